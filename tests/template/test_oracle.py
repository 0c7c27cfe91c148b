"""The program and `oracle.Oracle` compute the same results from random tables.

The tables have levels, weights, missing scores, relations, features and all other optional columns.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import analyse_metrics
import data
import metrics
from baseline import Baseline, additive_baseline
from config import Config
from data import DataConfig
from data_cells import SPLITS
from errors import UserError
from model import ModelConfig
from optim import OptimConfig
from task import KnockoutTask
from tests.template.fixtures import write_table
from tests.template.oracle import Oracle, Parameters, combination, figures
from tests.template.results import read_results
from tests.template.tasks import lines_of_test

LEVELS = ([0], [0, 2], [0.3], [0, 0.3, 1], [0.5, 2, 1], [0, 0.3, 0.5, 1, 2], [0, 0.5, 10_000])
SHARES = (0.3, 0.15, 0.1, 0.15, 0.1, 0.15, 0.05)  # probabilities of these lists of levels
FIGURES = {
    "mse": metrics.mse,
    "pearson": metrics.pearson,
    "r2": analyse_metrics.r2,
    "spearman": metrics.spearman,
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Makes fits of two scores at once, and products with 20 rows at once."""
    monkeypatch.setattr("baseline.TARGETS_AT_ONCE", 2)
    monkeypatch.setattr("baseline.ROWS_AT_ONCE", 20)
    monkeypatch.setattr("baseline_ridge.ROWS_AT_ONCE", 20)


# ---- Random tables -------------------------------------------------------------------------------
def draw(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of an `Oracle`, and further options, drawn with this seed.

    If `split` is None, the program draws the split. If `weight` is None, rows do not have weights.
    """
    rng = np.random.default_rng(seed)
    names = [f"g{k}" for k in rng.permutation(int(rng.integers(6, 15)))]
    sets = draw_sets(rng, names)
    binary = rng.random() < 0.25
    y = draw_scores(rng, sets, names, binary)
    split = draw_split(rng, len(sets), y)
    weight = rng.choice([0.25, 1, 2.5], len(sets)) if rng.random() < 0.5 else None
    edges = draw_edges(rng, names)
    features = draw_features(rng, names)
    fields = {
        "sets": sets,
        "y": y,
        "split": split,
        "weight": weight,
        "edges": edges,
        "features": features,
        "undirected": rng.random() < 0.5,
        "binary": binary,
    }
    readout = str(rng.choice(["both", "local", "global", "nodes"]))
    targets = [f"score{t}" for t in range(y.shape[1])]
    if readout == "nodes":
        in_sets = dict.fromkeys(name for row in sets for name in row)
        targets = list(in_sets)[: len(targets)]
    options = {
        "readout": readout,
        "targets": targets,
        "split": "nodes" if rng.random() < 0.5 and len(names) > 9 else "random",
        "weight": str(rng.choice(["weight", "sd"])),
        "message_passing": str(rng.choice(["shared", "reach", "expanded"])),
        "layers": int(rng.integers(1, 4)),
        "embedding": not features or rng.random() < 0.7,
    }
    return fields, options


def draw_sets(rng: np.random.Generator, names: list[str]) -> list[dict[str, float]]:
    """Returns sets of nodes and their levels, many of which occur twice.

    The first set is empty, and the second set is one node. Some nodes occur only in the last 30 %
    of the sets, except for this node.
    """
    levels = LEVELS[rng.choice(len(LEVELS), p=SHARES)]
    first_names = names[int(rng.integers(len(names) // 2)) :]
    size = int(rng.integers(30, 60))
    sets = [{}, {names[0]: float(levels[0])}]
    while len(sets) < size:
        chosen = rng.permutation(first_names if len(sets) < 0.7 * size else names)
        count = rng.choice([0, 1, 2, 3], p=[0.1, 0.3, 0.4, 0.2])
        row = {str(name): float(rng.choice(levels)) for name in chosen[:count]}
        sets += [row] * rng.choice([1, 2], p=[0.7, 0.3])
    return sets


def draw_scores(
    rng: np.random.Generator, sets: list[dict[str, float]], names: list[str], binary: bool
) -> np.ndarray:
    """Returns one to three additive scores, [rows, scores], of which some are missing."""
    num_targets = int(rng.integers(1, 4))
    effects = {name: rng.normal(0.5, 1, num_targets) for name in names}
    y = rng.normal(3, 0.5, (len(sets), num_targets))
    for i, row in enumerate(sets):
        for name, level in row.items():
            y[i] += effects[name] * (1 - min(level, 3.0))
    y = y * 10.0 ** rng.integers(-2, 3)
    if binary:
        y = (y > np.median(y, axis=0)).astype(float)
    y[rng.random(y.shape) < rng.choice([0, 0.2, 0.6], num_targets)] = math.nan
    return y


def draw_split(rng: np.random.Generator, num_rows: int, y: np.ndarray) -> np.ndarray | None:
    """Returns the split of each row, or None. The last 30 % of the rows are not training rows.

    If there are several scores, no validation row may have the first score.
    """
    if rng.random() < 0.4:
        return None
    split = rng.choice(3, num_rows, p=[0.7, 0.15, 0.15])
    is_last = np.arange(num_rows) >= 0.7 * num_rows
    split[is_last] = rng.choice([1, 2], is_last.sum())
    if y.shape[1] > 1 and rng.random() < 0.3:
        y[split == 1, 0] = math.nan
    return split


def draw_edges(rng: np.random.Generator, names: list[str]) -> list[tuple[str, str, str, float]]:
    """Returns random edges, including self-loops and duplicates. Some graphs have weights."""
    connected = rng.permutation(names)[int(rng.integers(3)) :]
    has_weights = rng.random() < 0.5
    edges = []
    for _ in range(rng.integers(3, 4 * len(names))):
        source, target = map(str, rng.choice(connected, 2))
        relation = f"r{rng.integers(3)}"
        for _ in range(rng.choice([1, 2], p=[0.8, 0.2])):
            edges.append((source, target, relation, rng.uniform(0.1, 3) if has_weights else 1.0))
    return edges


def draw_features(rng: np.random.Generator, names: list[str]) -> dict[str, float]:
    """Returns a feature of most nodes, and of a node that is not in the graph; or no feature."""
    if rng.random() < 0.6:
        return {}
    listed = [str(name) for name in rng.permutation(names)[2:]]
    values = rng.normal(5, 3, len(listed))
    return {**dict(zip(listed, values, strict=True)), names[0]: math.nan, "elsewhere": 100.0}


# ---- Files ---------------------------------------------------------------------------------------
def write(fields: dict[str, Any], options: dict[str, Any], folder: Path) -> Config:
    """Writes the tables, and returns the configuration of a run with them."""
    rng = np.random.default_rng(0)
    edges = [("source", "target", "relation", "weight"), *fields["edges"]]
    write_table(folder / "edges.tsv", edges)
    header = ["genes", *options["targets"]]
    rows = []
    for row, scores in zip(fields["sets"], fields["y"].tolist(), strict=True):
        names = [f"{name}={level}" if level else name for name, level in row.items()]
        cell = ",".join(rng.permutation(names + names[:1]))  # the first name occurs twice
        cells = ["" if math.isnan(score) else score for score in scores]
        # The first missing score is written as NA: a line with only empty cells is not a row.
        rows.append([cell, "NA" if cells[0] == "" else cells[0], *cells[1:]])
    if fields["split"] is not None:
        header.append("split")
        rows = [[*row, SPLITS[k]] for row, k in zip(rows, fields["split"], strict=True)]
    if fields["weight"] is not None:
        power = {"weight": 1, "sd": -0.5}[options["weight"]]
        header.append(options["weight"])
        rows = [[*row, value**power] for row, value in zip(rows, fields["weight"], strict=True)]
    write_table(folder / "scores.tsv", [header, *rows])
    features = fields["features"].items()
    rows = [(name, "NA" if math.isnan(value) else value) for name, value in features]
    write_table(folder / "features.tsv", [("gene", "length"), *rows])
    of_data = DataConfig(
        edges=str(folder / "edges.tsv"),
        perturbations=str(folder / "scores.tsv"),
        features=str(folder / "features.tsv") if fields["features"] else "",
        undirected=fields["undirected"],
        cache_dir=str(folder / "cache"),
    )
    if fields["split"] is None:
        of_data = replace(of_data, split=options["split"], val_fraction=0.3, test_fraction=0.2)
    of_model = ModelConfig(
        hidden=4,
        layers=options["layers"],
        readout=options["readout"],
        embedding=options["embedding"],
        message_passing=options["message_passing"],
    )
    loss = "binary" if fields["binary"] else "squared"
    return Config(data=of_data, model=of_model, optim=OptimConfig(loss=loss, precision="fp64"))


# ---- Comparisons ---------------------------------------------------------------------------------
def compare(seed: int, folder: Path) -> None:
    """Compares the results of the program and of the oracle for random tables."""
    fields, options = draw(seed)
    config = write(fields, options, folder)
    tables = data.load(config.data)
    has_split = fields["split"] is not None
    if not has_split:
        fields["split"] = tables.split.numpy()
    if fields["weight"] is None:
        fields["weight"] = np.ones(len(fields["sets"]))
    if is_refused(fields["y"], fields["split"]):
        with pytest.raises(UserError, match="row has a value of score"):
            KnockoutTask.from_tables(tables, config)
        return
    oracle = Oracle(**fields)
    oracle.set_code = tables.set_code(
        tables.node_code()
    ).numpy()  # the oracle cannot compute these random codes
    assert tables.genes == oracle.nodes
    if not has_split:
        compare_split(config.data.split, oracle)
    task = KnockoutTask.from_tables(tables, config)
    compare_baseline(task, oracle)
    model, state = disturbed_model(task, seed)
    if "terms.pairs.units" in state:
        np.testing.assert_allclose(state["terms.pairs.units"], oracle.units_of_pairs(), rtol=1e-5)
    outputs = predict(task, model)
    expected = oracle.forward(state, options["targets"])
    assert_close(outputs, expected)
    compare_losses(task, oracle, outputs)
    compare_metrics(task, oracle, outputs)
    compare_test_rows(task, oracle, folder)


def compare_split(option: str, oracle: Oracle) -> None:
    """Checks the split that the program drew.

    In a split by nodes, all test rows must have an unseen node. In a random split, all rows with
    the same nodes and levels must be in the same split.
    """
    if option == "nodes":
        assert (oracle.unseen()[oracle.split == 2] > 0).all()
        return
    rows = [tuple(level) for level in oracle.level]
    assert len(set(zip(rows, oracle.split, strict=True))) == len(set(rows))


def is_refused(y: np.ndarray, split: np.ndarray) -> bool:
    """Returns whether the program must refuse the tables.

    It must if a score is missing in all training rows, or if all scores are missing in all
    validation rows.
    """
    has_score = ~np.isnan(y)
    return not (has_score[split == 0].any(axis=0).all() and has_score[split == 1].any())


def assert_close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Asserts that numbers are equal up to `tolerance` times the largest number, or times 1."""
    largest = np.abs(np.nan_to_num(expected)).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1, largest))


def compare_baseline(task: KnockoutTask, oracle: Oracle) -> None:
    """Compares the additive baseline, and the predictions of the combination, for all rows."""
    additive = additive_baseline(task.tables, task.config.optim.loss)
    baseline = task.baseline
    assert_close(task.criterion.mean, oracle.mean)
    assert_close(task.criterion.std, oracle.std)
    np.testing.assert_allclose(1 / baseline.basis.amax(dim=0), oracle.units)
    for t in range(len(oracle.std)):
        found = additive.prediction[:, t].numpy()
        assert np.isfinite(found).all()
        if is_determined(oracle, t):
            distances = []
            for prediction, imputed in oracle.baselines(t):
                errors = [found - as_scores(prediction, oracle)]
                errors.append(additive.imputed[:, :, t].numpy() - imputed)
                distances.append(max(np.abs(error).max() for error in errors))
            assert min(distances) < 1e-5 * oracle.std[t]
        compare_combination(baseline, oracle, t)


def compare_combination(baseline: Baseline, oracle: Oracle, t: int) -> None:
    """Compares the baseline's predictions with predictions from its parameters.

    The tolerance is large, because the parameters are float32.
    """
    effect = baseline.effect[:, :, t].double().numpy()  # [N, K]
    responses = np.einsum("knp,pk->npk", oracle.doses, effect).sum(axis=2)  # [n, N]
    weights = baseline.weights[:, t : t + 1].numpy()
    combined = [combination(weights, row[:, None])[0] for row in responses]
    total = (1 - oracle.level).sum(axis=1)
    expected = baseline.intercept[t].item() + baseline.slope[t].item() * total + combined
    size = oracle.std[t] + np.abs(responses).max()
    found = baseline.prediction[:, t].numpy()
    assert np.abs(found - as_scores(expected, oracle)).max() < 1e-5 * size * len(effect)


def as_scores(prediction: np.ndarray, oracle: Oracle) -> np.ndarray:
    """Returns predictions as scores: logits of binary scores become probabilities."""
    return (1 + np.tanh(prediction / 2)) / 2 if oracle.binary else prediction


def disturbed_model(task: KnockoutTask, seed: int) -> tuple[torch.nn.Module, Parameters]:
    """Returns a model whose parameters are random and not zero, and its state."""
    torch.manual_seed(seed)
    model = task.build_model().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model, Parameters({name: value.numpy() for name, value in model.state_dict().items()})


@torch.no_grad()
def predict(task: KnockoutTask, model: torch.nn.Module) -> Tensor:
    """Returns the model's outputs for all rows, computed in batches."""
    batches = torch.arange(len(task.tables.y)).split(25)
    return torch.cat([model(task.graph, task.dataset.__getitems__(rows)) for rows in batches])


def compare_losses(task: KnockoutTask, oracle: Oracle, outputs: Tensor) -> None:
    """Compares predictions, and the losses of each split in validation and in training."""
    scores = oracle.mean + oracle.std * outputs.numpy()
    predictions = task.predictions(outputs.unsqueeze(2))["prediction"]
    assert_close(predictions, as_scores(scores, oracle))
    for number, split in enumerate(SPLITS):
        expected = oracle.loss(scores, number)
        rows = task.rows(split)
        assert_close(task.metrics(split, outputs[rows].unsqueeze(2))["loss"], expected)
        total = torch.zeros(len(oracle.std), dtype=torch.float64)
        for some_rows in rows.split(8):
            batch = task.dataset.__getitems__(some_rows)
            total += task.loss(outputs[some_rows], batch)
        in_training = (total / task.dataset.total_weight(rows)).nanmean()
        assert_close(in_training, expected, 1e-6)  # weights of batches are float32
        if split == "train":  # a training step divides the sum of losses by rows and scores
            assert_close(total.mean() / len(rows), expected, 1e-6)


def compare_metrics(task: KnockoutTask, oracle: Oracle, outputs: Tensor) -> None:
    """Compares each weighted metric of each score, and the mean over scores."""
    rows = task.rows("val")
    y = task.tables.y[rows]
    scores = task.predictions(outputs[rows].unsqueeze(2))["prediction"]
    weight = oracle.weight[rows]
    pairs = zip(y.T.numpy(), scores.T.numpy(), strict=True)
    expected = [figures(*pair, weight) for pair in pairs]
    for name, metric in FIGURES.items():
        of_scores = [of_score[name] for of_score in expected]
        found = metric(y, scores, torch.from_numpy(weight).unsqueeze(1))
        assert_close(found, of_scores)
    found = analyse_metrics.auroc(y == 1, metrics.as_ranked(y, scores))
    assert_close(found, [of_score["auroc"] for of_score in expected], 1e-6)
    reported = task.metrics("val", outputs[rows].unsqueeze(2))
    assert reported["n"] == (~y.isnan()).any(dim=1).sum()
    for name in ("mse", "pearson"):
        of_scores = torch.tensor([of_score[name] for of_score in expected])
        assert_close(reported[name], of_scores.nanmean().item())


def compare_test_rows(task: KnockoutTask, oracle: Oracle, folder: Path) -> None:
    """Compares the numbers of unseen nodes, and the bootstrap clusters of test.tsv.

    The share of unseen nodes in validation rows is also compared, because training hides this share
    of nodes.
    """
    in_val = oracle.present & (oracle.split == 1)[:, None]
    num_unseen = (oracle.unseen() * in_val).sum()
    num_perturbed = (oracle.perturbs.sum(axis=1, keepdims=True) * in_val).sum()
    assert_close(task.tables.unseen_share("val"), num_unseen / max(num_perturbed, 1), 1e-6)
    for number, split in enumerate(SPLITS):
        expected = oracle.unseen()[oracle.split == number]
        np.testing.assert_array_equal(task.tables.unseen(split), expected)
    path = folder / "test.tsv"
    rows = task.rows("test")
    path.write_text("".join(lines_of_test(task, task.rivals["baseline"][rows])))
    predictions = read_results(path)
    if predictions.weight is not None:
        np.testing.assert_allclose(predictions.weight, oracle.weight[oracle.split == 2], rtol=1e-6)
    np.testing.assert_array_equal(predictions.unseen, oracle.unseen()[oracle.split == 2])
    assert predictions.cluster_numbers().tolist() == expected_clusters(oracle)


def expected_clusters(oracle: Oracle) -> list[list[int]]:
    """Returns the numbers of the bootstrap clusters of each test row.

    The clusters are the nodes of the row that are unseen for one of its scores. If there are more
    than two such nodes, the two nodes that are unseen in the most rows are used. If there are none,
    the cluster is the set of nodes of the row.
    """
    is_test = oracle.split == 2
    # number of scores of each row for which each node is unseen, [n, N]
    num_lacking = oracle.present.astype(int) @ ~oracle.seen.T
    is_unseen = (oracle.perturbs & (num_lacking > 0))[is_test]
    num_rows = is_unseen.sum(axis=0)
    number = {}
    clusters = []
    for nodes, row in zip(oracle.perturbs[is_test], is_unseen, strict=True):
        keys = sorted(np.flatnonzero(row), key=lambda node: -num_rows[node])[:2] or [tuple(nodes)]
        numbers = [number.setdefault(key, len(number)) for key in keys]
        clusters.append([*numbers, -1][:2])
    return clusters


def is_determined(oracle: Oracle, t: int) -> bool:
    """Returns whether the rows of each fit of a score identify its intercept and slope.

    These two coefficients are not penalised. If rows do not identify them, the solution is not
    unique.
    """
    dose = np.where(oracle.perturbs, 1 - oracle.level, 0).sum(axis=1)
    for rows in (oracle.rows_of_choice(t)[0], oracle.in_train[:, t]):
        if not rows.any() or np.ptp(dose[rows]) == 0:
            return False
        if oracle.binary:
            zeros = dose[rows & (oracle.y[:, t] == 0)]
            ones = dose[rows & (oracle.y[:, t] == 1)]
            if not (len(zeros) and len(ones)):
                return False
            if zeros.max() <= ones.min() or ones.max() <= zeros.min():
                return False
    return True


# Seed 1542: a third of the training sets chooses a penalty, and these sets have levels whose powers
# round differently.
@pytest.mark.parametrize("seed", [*range(12), 1542])
def test_random_tables(seed, tmp_path):
    compare(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(12, 40), *range(1000, 1012)])
def test_more_random_tables(seed, tmp_path):
    compare(seed, tmp_path)


@pytest.mark.parametrize("seed", [31, 82, 176])
def test_a_scaled_score_has_the_same_baseline(seed, tmp_path):
    """In these tables, all shrinkages of the imputed effects have the same error up to rounding."""
    fields, options = draw(seed)
    tables = data.load(write(fields, options, tmp_path).data)
    prediction = additive_baseline(tables).prediction
    for factor, shift in ((2, 3), (3, 1), (10, 0.1), (1e-12, 0)):
        scaled = additive_baseline(replace(tables, y=factor * tables.y + shift))
        assert_close((scaled.prediction - shift) / factor, prediction.numpy(), 1e-6)
