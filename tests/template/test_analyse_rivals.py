"""The rivals of the model in tests.bench.quality, and the results that it prints.

Each rival must predict tables with effects that it can represent, and fail on other tables.
"""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
from analyse_results import read_results
from baseline import additive_baseline
from config import Config
from data import DataConfig
from data_tables import Tables
from metrics import pearson
from run_checkpoint import write_atomically
from run_results import result_lines
from tests.bench import quality
from tests.bench.baselines import (
    BASELINES,
    LEVELS,
    Problem,
    features,
    low_rank,
    low_rank_neighbours,
    neighbours,
    recurring_pairs,
)
from tests.bench.quality import bootstrap, permute_names, summary
from tests.bench.synthetic import write
from tests.sets import pack_sets
from tests.template.fixtures import DEFAULTS, write_defaults
from tests.template.results import normal
from train import read_config

pytestmark = pytest.mark.slow  # run with --all, or by name

NUM_GENES = 40


def make_tables(
    score: Callable[[tuple[int, ...]], float],
    size: int,
    split: str,
    num_rows: int | None = None,
    edges: torch.Tensor | None = None,
) -> Tables:
    """Returns tables with all sets of `size` genes, or with `num_rows` of them.

    `score` maps the genes of a set to its score. By default, there are no edges.
    """
    sets = list(itertools.combinations(range(NUM_GENES), size))
    order = torch.randperm(len(sets), generator=torch.Generator().manual_seed(0))[:num_rows]
    sets = [sets[k] for k in order]
    if edges is None:
        edges = torch.empty(2, 0, dtype=torch.long)
    perturbed, perturbed_ptr = pack_sets(sets)
    tables = Tables(
        genes=[f"G{i:02d}" for i in range(NUM_GENES)],
        relations=["x"],
        edge_index=edges,
        edge_type=torch.zeros_like(edges[0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.tensor([float(score(genes)) for genes in sets], dtype=torch.float64),
    )
    make_split = data.node_split if split == "nodes" else data.random_split
    tables.split = make_split(tables, DataConfig(split=split, test_fraction=0.2))
    return tables


def without_edges(tables: Tables) -> Tables:
    return replace(
        tables,
        edge_index=tables.edge_index[:, :0],
        edge_type=tables.edge_type[:0],
        edge_weight=None,
    )


def zero(genes: tuple[int, ...]) -> float:
    return 0.0


def on_test_rows(tables: Tables, prediction: torch.Tensor) -> float:
    rows = tables.rows("test")
    return pearson(tables.y[rows, 0], prediction[rows]).item()


def module_edges() -> torch.Tensor:
    """Returns edges from each gene of four modules to two genes of its own module.

    Module k consists of the genes k, k + 4, ...
    """
    genes = torch.arange(NUM_GENES)
    return torch.stack([torch.cat([genes, genes]), torch.cat([genes % 4, genes % 4 + 4])])


@pytest.mark.parametrize("name", BASELINES | LEVELS)
@pytest.mark.parametrize("split", ["random", "nodes"])
def test_a_rival_does_not_use_the_test_scores(name, split):
    rival = (BASELINES | LEVELS)[name]
    effect = normal(NUM_GENES, 3)

    def score(genes: tuple[int, ...]) -> torch.Tensor:
        return effect[list(genes)].prod(0).sum()

    tables = make_tables(score, 2, split, num_rows=300, edges=module_edges())
    if name in LEVELS:
        tables.level = random_levels(tables)
    before = rival(Problem(tables))
    changed = copy.deepcopy(tables)
    changed.y[changed.rows("test")] = 100 * normal(len(changed.rows("test")), 1)
    assert torch.equal(rival(Problem(changed)), before)
    assert before.shape == tables.y[:, 0].shape
    assert before.isfinite().all()


def random_levels(tables: Tables) -> torch.Tensor:
    """Returns a random level, 0, 0.5 or 3, for each entry of `tables.perturbed`."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64)
    return levels[torch.randint(3, (len(tables.perturbed),), generator=generator)]


def test_each_rival_for_levels_fits_its_own_kind_of_response():
    """The response is linear in the level, quadratic, includes its logarithm, or is arbitrary."""
    tables = make_tables(zero, 3, "random", num_rows=600)
    tables.level = random_levels(tables)
    dose = 1 - tables.level
    first = normal(NUM_GENES)[tables.perturbed]
    second = normal(NUM_GENES, seed=1)[tables.perturbed]
    number_of_level = (2 * tables.level).long().clamp(max=2)
    of_each_level = normal(3, NUM_GENES, seed=3)[number_of_level, tables.perturbed]
    logarithm = (tables.level + 0.03).log()
    responses = [
        dose * first,
        dose * first + dose.square() * second,
        dose * first + logarithm * second,
        of_each_level,
    ]
    for k, response in enumerate(responses):
        none = torch.zeros(len(tables.y), dtype=torch.float64)
        tables.y = none.index_add(0, tables.sample(), response).unsqueeze(1)
        known = [on_test_rows(tables, rival(Problem(tables))) > 0.995 for rival in LEVELS.values()]
        assert known == [k == 0, k <= 1, k in (0, 2), True]


def test_rows_at_levels_that_are_held_back_are_the_test_rows(tmp_path):
    levels = torch.tensor([0.0, 0.25, 0.5, 2.0, 3.0], dtype=torch.float64)
    edges = torch.tensor([[0], [1]])
    tables = make_tables(zero, 2, "random", edges=edges)
    tables.level = levels[torch.arange(len(tables.perturbed)) % 7 % 5]
    write_defaults(tmp_path)
    overrides = [*write(tables, tmp_path / "whole"), f"data.cache_dir={tmp_path}"]
    overrides += ["--config", str(tmp_path / DEFAULTS)]
    options = quality.hold_levels_back(read_config(overrides), tmp_path, seed=0)
    held_back = data.load(read_config([*overrides, *options]).data)
    is_held_back = torch.isin(held_back.level, torch.tensor(quality.HELD_BACK).double())
    rows = held_back.sample()[is_held_back]
    has_one = torch.bincount(rows, minlength=len(held_back.y)) > 0
    assert 0 < has_one.sum() < len(has_one)
    assert torch.equal(held_back.is_in("test"), has_one)
    assert len(held_back.rows("val")) == int((~has_one).sum()) // 10


@pytest.mark.parametrize("size", [2, 3])
def test_low_rank_pairs_are_found_in_rows_of_any_size(size):
    effect = normal(NUM_GENES)
    profile = normal(NUM_GENES, 2, seed=1)

    def score(genes: tuple[int, ...]) -> torch.Tensor:
        total = effect[list(genes)].sum()
        for a, b in itertools.combinations(genes, 2):
            total = total + profile[a, 0] * profile[b, 0] - profile[a, 1] * profile[b, 1]
        return total

    tables = make_tables(score, size, "random", num_rows=1500)
    problem = Problem(tables)
    assert on_test_rows(tables, problem.additive) < 0.9
    assert on_test_rows(tables, low_rank(problem)) > 0.97


def test_recurring_pairs_get_their_own_effect():
    effect = normal(NUM_GENES)

    def score(genes: tuple[int, ...]) -> torch.Tensor:
        return effect[list(genes)].sum() + 5 * ({0, 1} <= set(genes))

    tables = make_tables(score, 3, "random")
    problem = Problem(tables)
    sample = tables.sample()
    row = torch.arange(len(tables.y))
    has_0 = torch.isin(row, sample[tables.perturbed == 0])
    has_1 = torch.isin(row, sample[tables.perturbed == 1])
    error = (recurring_pairs(problem) - problem.y).abs()
    additive_error = (problem.additive - problem.y).abs()
    assert error[has_0 & has_1].max() < 0.5
    assert additive_error[has_0 & has_1].min() > 0.5


def test_without_recurring_pairs_the_ridge_remains():
    tables = make_tables(lambda genes: sum(genes), 2, "random")
    problem = Problem(tables)
    torch.testing.assert_close(recurring_pairs(problem), problem.additive)


@pytest.mark.parametrize("rival", [neighbours, low_rank_neighbours])
def test_an_unseen_gene_is_predicted_from_its_neighbours(rival):
    """Scores depend only on the modules of the genes, and edges are only within modules."""
    effect = normal(4, 4)

    def score(genes: tuple[int, ...]) -> torch.Tensor:
        a, b = genes
        return effect[a % 4, b % 4] + effect[b % 4, a % 4]

    tables = make_tables(score, 2, "nodes", edges=module_edges())
    assert on_test_rows(tables, Problem(tables).additive) < 0.8
    assert on_test_rows(tables, rival(Problem(tables))) > 0.95
    no_edges = without_edges(tables)
    assert on_test_rows(no_edges, rival(Problem(no_edges))) < 0.8


def test_an_unseen_gene_is_predicted_from_its_features():
    """Random features are not informative."""
    x = normal(NUM_GENES, 3)
    effect = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    tables = make_tables(lambda genes: effect[list(genes)].sum(), 2, "nodes")
    additive = on_test_rows(tables, Problem(tables).additive)
    assert on_test_rows(tables, features(Problem(tables))) == additive < 0.8
    tables.features = x.float()
    assert on_test_rows(tables, features(Problem(tables))) > 0.95
    tables.features = normal(NUM_GENES, 3, seed=2).float()
    assert on_test_rows(tables, features(Problem(tables))) < 0.8


@pytest.mark.parametrize("split", ["random", "nodes"])
def test_neighbours_equal_a_plain_loop(split):
    edges = torch.randint(NUM_GENES, (2, 150), generator=torch.Generator().manual_seed(1))
    effect = normal(NUM_GENES, NUM_GENES)
    tables = make_tables(lambda genes: effect[genes], 2, split, num_rows=150, edges=edges)
    problem = Problem(tables)
    adjacency = torch.zeros(NUM_GENES, 2 * NUM_GENES)
    for source, target in edges.T.tolist():
        adjacency[source, target] += 1
        adjacency[target, NUM_GENES + source] += 1
    adjacency = torch.nn.functional.normalize(adjacency, dim=1).double()
    weight = (adjacency @ adjacency.T / 0.3).exp()
    train_rows = set(tables.rows("train").tolist())
    pairs = tables.perturbed.view(-1, 2).tolist()
    interaction = {}  # residual of each pair in a training row, in both orders
    for row, (a, b) in enumerate(pairs):
        if row in train_rows:
            interaction[a, b] = problem.residual[row]
            interaction[b, a] = problem.residual[row]
    seen = {a for a, _ in interaction}
    baseline = additive_baseline(tables)
    ridge = dict(zip(problem.nodes.tolist(), problem.effect.tolist(), strict=True))

    def average(terms: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Returns the weighted mean of values, given (weight, value) pairs."""
        return sum(w * value for w, value in terms) / sum(w for w, _ in terms)

    def effect_of(node: int) -> torch.Tensor | float:
        if node in seen:
            return ridge[node]
        return average([(weight[node, other], ridge[other]) for other in seen])

    expected = []
    for a, b in pairs:
        near = []
        far = []
        for (c, d), value in interaction.items():
            if d == b:
                near.append((weight[a, c], value))
            if c == a:
                near.append((weight[b, d], value))
            far.append((weight[a, c] * weight[b, d], value))
        additive = baseline.intercept[0] + 2 * baseline.slope[0] + effect_of(a) + effect_of(b)
        expected.append(additive + average(near or far))
    torch.testing.assert_close(neighbours(problem, [("cosine", 0.3)]), torch.stack(expected))


def test_the_summary_compares_with_the_rival_that_is_best_in_validation():
    y = normal(400, 1)

    def result(noise: float, validation: float, seed: int) -> dict:
        prediction = y + noise * normal(400, 1, seed=seed)
        return {
            "validation": validation,
            "Pearson": pearson(y, prediction).item(),
            "MSE": 1.0,
            "seconds": 0.0,
            "y": y,
            "prediction": prediction,
            "cluster": torch.stack([torch.arange(400) // 2, torch.full((400,), -1)], dim=1),
        }

    noises = dict(zip(BASELINES, (3.0, 1.0, 2.0, 2.0, 0.3, 2.0, 2.0, 2.0, 2.0), strict=True))
    noises["ours, both"] = 0.5
    splits = {}
    for s in range(2):
        results = {}
        for k, (name, noise) in enumerate(noises.items()):
            validation = 0.9 if name == "additive ridge" else 0.1
            results[name] = result(noise, validation, seed=k + 10 * s + 1)
        splits[f"random:{s}"] = results
    means, each = summary("random", splits).values()
    rows = {row["contestant"]: row for row in means}
    assert len(each) == 2 * len(noises)
    assert rows["additive ridge"]["difference"] == 0
    ours = rows["ours, both"]
    assert 0 < ours["2.5 %"] < ours["difference"] < ours["97.5 %"]
    assert ours["mean"] == pytest.approx((ours["random:0"] + ours["random:1"]) / 2)
    assert ours["spread"] == pytest.approx(abs(ours["random:0"] - ours["random:1"]) / math.sqrt(2))
    gains = bootstrap(splits["random:0"], best=1)[:, -1]
    of_split = next(row for row in each if row["contestant"] == "ours, both")
    assert of_split["2.5 %"] == pytest.approx(gains.quantile(0.025).item())


def test_the_noise_ceiling_of_a_preset_is_a_contestant(tmp_path, monkeypatch):
    """The noise ceiling and the ridge have the values in tests/bench/README.md."""
    monkeypatch.setattr(quality, "BASELINES", {"additive ridge": BASELINES["additive ridge"]})
    write_defaults(tmp_path)
    arguments = [
        f"--config={tmp_path / DEFAULTS}",
        "--preset=small",
        f"--dir={tmp_path}",
        f"data.cache_dir={tmp_path}/cache",
        "--models",
    ]
    results = quality.contest("random:0", quality.parse_arguments(arguments), ddp=None)
    rounded = {name: round(figures["Pearson"], 3) for name, figures in results.items()}
    assert rounded == {"additive ridge": 0.772, "noise ceiling": 0.934}


def test_the_mean_of_several_seeds_is_a_contestant(tmp_path, monkeypatch):
    """The mean is better than its members, because their errors are independent."""
    tables = data.load(DataConfig(cache_dir=str(tmp_path)))

    def ours(name, overrides, options, ddp):
        values = dict(override.split("=") for override in overrides)
        noise = normal(len(tables.y), 1, seed=int(values["run.seed"]))
        return tables.y + noise, 2.0

    monkeypatch.setattr(quality, "BASELINES", {"additive ridge": BASELINES["additive ridge"]})
    monkeypatch.setattr(quality, "ours", ours)
    write_defaults(tmp_path)
    arguments = [f"--config={tmp_path / DEFAULTS}", f"data.cache_dir={tmp_path}"]
    arguments += ["--models", "local", "--seeds", "3"]
    results = quality.contest("random:0", quality.parse_arguments(arguments), ddp=None)
    members = [f"ours, local, seed {seed}" for seed in range(3)]
    together = "ours, local, all 3"
    assert list(results) == ["additive ridge", *members, together]
    assert results[together]["seconds"] == 6.0
    best = max(results[name]["Pearson"] for name in members)
    assert results[together]["Pearson"] > best + 0.05


@pytest.mark.parametrize("split", ["random", "nodes"])
def test_the_study_draws_the_same_clusters_as_the_analysis(tmp_path, split):
    """Some sets recur, also at different levels. Some nodes are unseen for one of two scores."""
    tables = make_tables(zero, 2, split, num_rows=300)
    tables.level = random_levels(tables)
    tables.y = normal(300, 2)
    in_train = tables.is_in("train")[tables.sample()]
    rows_of_some = tables.sample()[in_train & (tables.perturbed < 5)]
    tables.y[rows_of_some, 1] = math.nan
    tables.targets = ["a", "b"]
    rows = tables.rows("test")
    scores = tables.y[rows]
    lines = result_lines(tables, {"prediction": scores}, {"baseline": scores})
    write_atomically(tmp_path / "test.tsv", lines)
    of_file = read_results(tmp_path / "test.tsv").cluster_numbers()
    found = quality.clusters(tables)
    assert 5 < len(found.unique()) < len(rows)
    both = torch.stack([of_file.flatten(), found.flatten()])
    assert len(both.unique(dim=1).T) == len(found.unique()) == len(of_file.unique())


@pytest.mark.parametrize("split", ["random", "nodes"])
def test_permuted_names_change_only_the_graph(tmp_path, split):
    options = DataConfig(split=split, cache_dir=str(tmp_path))
    overrides = permute_names(Config(data=options), tmp_path)
    changed = dict(override.removeprefix("data.").split("=") for override in overrides)
    assert Path(changed["edges"]).parent == tmp_path
    assert Path(changed["perturbations"]) == data.EXAMPLE / "scores.tsv"
    before = data.load(options)
    after = data.load(replace(options, **changed))
    for name in ("genes", "relations"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("perturbed", "perturbed_ptr", "y", "split"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    edges_before = before.graph().edge_index_dict.values()
    edges_after = after.graph().edge_index_dict.values()
    for old, new in zip(edges_before, edges_after, strict=True):
        old_degree, new_degree = (torch.bincount(edges[0], minlength=400) for edges in (old, new))
        assert not torch.equal(old_degree, new_degree)
        assert torch.equal(old_degree.sort().values, new_degree.sort().values)
