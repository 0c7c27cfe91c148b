"""The baselines of tests.bench.quality, and the figures made of them.

They run on tables whose effects they can know or not.
"""

import copy
import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import baseline
import config
import data
import train
from data import DataConfig
from errors import UserError
from metrics import pearson
from tables import Tables
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
from tests.bench.quality import bootstrap, permute_names, random_features, summary
from tests.bench.synthetic import write
from tests.conftest import write_table
from tests.tools.runs import pack_sets

NUM_GENES = 40


def make_tables(
    score, size: int, split: str, num_rows: int | None = None, edges: torch.Tensor | None = None
) -> Tables:
    """Returns a table of all or `num_rows` sets of `size` genes and their `score`.

    It has no edges unless some are given.
    """
    sets = list(itertools.combinations(range(NUM_GENES), size))
    order = torch.randperm(len(sets), generator=torch.Generator().manual_seed(0))[:num_rows]
    sets = [sets[k] for k in order]
    genes = [f"G{i:02d}" for i in range(NUM_GENES)]
    y = torch.tensor([float(score(genes)) for genes in sets], dtype=torch.float64)
    edges = torch.empty(2, 0, dtype=torch.long) if edges is None else edges
    tables = Tables(genes, ["x"], edges, torch.zeros_like(edges[0]), *pack_sets(sets), y)
    make_split = data.node_split if split == "nodes" else data.random_split
    tables.split = make_split(tables, DataConfig(split=split, test_fraction=0.2))
    return tables


def on_test_rows(tables: Tables, prediction: torch.Tensor) -> float:
    rows = tables.rows("test")
    return pearson(tables.y[rows, 0], prediction[rows]).item()


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def module_edges() -> torch.Tensor:
    """Returns edges from each gene of four modules to two of the module's own.

    A module is the genes k, k + 4, ...
    """
    genes = torch.arange(NUM_GENES)
    return torch.stack([torch.cat([genes, genes]), torch.cat([genes % 4, genes % 4 + 4])])


@pytest.mark.parametrize("name", BASELINES | LEVELS)
@pytest.mark.parametrize("split", ["random", "nodes"])
def test_a_baseline_does_not_see_the_test_scores(name, split):
    baseline = (BASELINES | LEVELS)[name]
    effect = normal(NUM_GENES, 3)
    tables = make_tables(
        lambda genes: effect[list(genes)].prod(0).sum(), 2, split, edges=module_edges()
    )
    if name in LEVELS:
        tables.level = with_levels(tables)
    before = baseline(Problem(tables))
    changed = copy.deepcopy(tables)
    changed.y[changed.rows("test")] = 100 * normal(len(changed.rows("test")), 1)
    assert torch.equal(baseline(Problem(changed)), before)
    assert before.shape == tables.y[:, 0].shape and before.isfinite().all()


def with_levels(tables: Tables) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64)[
        torch.randint(3, (len(tables.perturbed),), generator=generator)
    ]


def test_each_rival_of_levels_knows_its_own_response():
    """Linear in the level, quadratic, and any other."""
    tables = make_tables(lambda genes: torch.tensor(0.0), 3, "random", num_rows=1500)
    tables.level = with_levels(tables)
    dose = 1 - tables.level.double()
    of_levels = normal(3, NUM_GENES, seed=3)[
        (2 * tables.level).long().clamp(max=2), tables.perturbed
    ]
    first, second = normal(NUM_GENES)[tables.perturbed], normal(NUM_GENES, seed=1)[tables.perturbed]
    responses = [dose * first, dose * first + dose.square() * second, of_levels]
    for k, response in enumerate(responses):
        tables.y = (
            torch.zeros(len(tables.y), dtype=torch.float64)
            .index_add(0, tables.sample(), response)
            .unsqueeze(1)
        )
        known = [on_test_rows(tables, rival(Problem(tables))) > 0.995 for rival in LEVELS.values()]
        assert known == [k == 0, k <= 1, True]


def test_rows_at_levels_that_are_held_back_are_the_test_rows(tmp_path):
    tables = make_tables(lambda genes: torch.tensor(0.0), 2, "random")
    tables.level = torch.tensor([0.0, 0.25, 0.5, 2.0, 3.0]).double()[
        torch.arange(len(tables.perturbed)) % 7 % 5
    ]
    tables.edge_index, tables.edge_type = torch.tensor([[0], [1]]), torch.tensor([0])
    tables.edge_weight = tables.edge_attr = None
    options = write(Tables(**vars(tables)), tmp_path / "whole")
    overrides = [*options, f"data.cache_dir={tmp_path}", "--config", os.devnull]
    config = train.read_config(overrides)
    options = quality.hold_levels_back(config, tmp_path, seed=0)
    held_back = data.load(train.read_config([*overrides, *options]).data)
    has = torch.isin(held_back.level, torch.tensor(quality.HELD_BACK).double())
    counts = torch.bincount(held_back.sample()[has], minlength=len(held_back.y))
    assert 0 < (counts > 0).sum() < len(counts) and torch.equal(held_back.is_in("test"), counts > 0)
    assert len(held_back.rows("val")) == int((counts == 0).sum()) // 10


@pytest.mark.parametrize("size", [2, 3])
def test_low_rank_pairs_are_found_in_rows_of_any_size(size):
    effect, profile = normal(NUM_GENES), normal(NUM_GENES, 2, seed=1)

    def score(genes):
        pairs = itertools.combinations(genes, 2)
        return effect[list(genes)].sum() + sum(
            profile[a, 0] * profile[b, 0] - profile[a, 1] * profile[b, 1] for a, b in pairs
        )

    tables = make_tables(score, size, "random", num_rows=1500)
    problem = Problem(tables)
    assert on_test_rows(tables, problem.additive) < 0.9
    assert on_test_rows(tables, low_rank(problem)) > 0.97


def test_recurring_pairs_get_an_effect_of_their_own():
    effect = normal(NUM_GENES)
    tables = make_tables(
        lambda genes: effect[list(genes)].sum() + 5 * ({0, 1} <= set(genes)), 3, "random"
    )
    problem = Problem(tables)
    both = torch.isin(
        torch.arange(len(tables.y)), tables.sample()[tables.perturbed == 0]
    ) & torch.isin(torch.arange(len(tables.y)), tables.sample()[tables.perturbed == 1])
    error = (recurring_pairs(problem) - problem.y).abs()
    assert error[both].max() < 0.5 < (problem.additive - problem.y).abs()[both].min()


def test_without_recurring_pairs_the_ridge_remains():
    tables = make_tables(lambda genes: sum(genes), 2, "random")
    problem = Problem(tables)
    torch.testing.assert_close(recurring_pairs(problem), problem.additive)


@pytest.mark.parametrize("baseline", [neighbours, low_rank_neighbours])
def test_an_unseen_gene_is_known_by_its_neighbours(baseline):
    """Scores depend on the genes' modules only, which the graph tells."""
    effect = normal(4, 4)
    tables = make_tables(
        lambda genes: effect[genes[0] % 4, genes[1] % 4] + effect[genes[1] % 4, genes[0] % 4],
        2,
        "nodes",
        edges=module_edges(),
    )
    assert on_test_rows(tables, Problem(tables).additive) < 0.8
    assert on_test_rows(tables, baseline(Problem(tables))) > 0.95
    no_edges = {"edge_index": torch.empty(2, 0).long(), "edge_type": torch.empty(0).long()}
    nothing = replace(tables, **no_edges, edge_weight=None, edge_attr=None)
    assert on_test_rows(nothing, baseline(Problem(nothing))) < 0.8


def test_an_unseen_gene_is_known_by_its_features():
    """Random vectors in their place tell nothing."""
    x = normal(NUM_GENES, 3)
    tables = make_tables(
        lambda genes: (x[list(genes)] @ torch.tensor([1.0, -2.0, 0.5]).double()).sum(), 2, "nodes"
    )
    assert (
        on_test_rows(tables, features(Problem(tables)))
        == on_test_rows(tables, Problem(tables).additive)
        < 0.8
    )
    tables.features = x.float()
    assert on_test_rows(tables, features(Problem(tables))) > 0.95
    tables.features = normal(NUM_GENES, 3, seed=2).float()
    assert on_test_rows(tables, features(Problem(tables))) < 0.8


def test_random_features_stand_in_for_those_of_the_same_genes(tmp_path):
    rows = {
        "edges": [("source", "target", "relation"), ("a", "b", "x"), ("b", "c", "x")],
        "perturbations": [
            ("genes", "score", "split"),
            ("a", 1, "train"),
            ("b", 2, "val"),
            ("c", 3, "test"),
        ],
        "features": [("gene", "f", "g"), ("c", 1, 0), ("a", 0, 1)],
    }
    paths = {
        name: str(write_table(tmp_path / f"{name}.tsv", table)) for name, table in rows.items()
    }
    config = config.Config(data=DataConfig(**paths, cache_dir=str(tmp_path)))
    (override,) = random_features(config, tmp_path / "new")
    before, after = (
        data.load(config.data),
        data.load(replace(config.data, features=override.partition("=")[2])),
    )
    assert torch.equal(before.features != 0, after.features != 0) and not torch.equal(
        before.features, after.features
    )
    with pytest.raises(UserError, match=r"set data\.features"):
        random_features(config.Config(data=replace(config.data, features="")), tmp_path)


@pytest.mark.parametrize("split", ["random", "nodes"])
def test_neighbours_equal_a_plain_loop(split):
    edges = torch.randint(NUM_GENES, (2, 150), generator=torch.Generator().manual_seed(1))
    effect = normal(NUM_GENES, NUM_GENES)
    tables = make_tables(lambda genes: effect[genes], 2, split, num_rows=150, edges=edges)
    problem, train_rows = Problem(tables), set(tables.rows("train").tolist())
    adjacency = torch.zeros(NUM_GENES, 2 * NUM_GENES)
    for source, target in edges.T.tolist():
        adjacency[source, target] += 1
        adjacency[target, NUM_GENES + source] += 1
    adjacency = torch.nn.functional.normalize(adjacency, dim=1).double()
    weight = (adjacency @ adjacency.T / 0.3).exp()
    interaction, seen = {}, set()
    for row, pair in enumerate(tables.perturbed.view(-1, 2).tolist()):
        if row in train_rows:
            interaction[tuple(pair)] = interaction[tuple(pair[::-1])] = problem.residual[row]
            seen |= set(pair)
    known = baseline.additive_baseline(tables)
    ridge = dict(zip(problem.nodes.tolist(), problem.effect.tolist(), strict=True))

    def average(terms):
        terms = list(terms)
        return sum(w * value for w, value in terms) / sum(w for w, _ in terms) if terms else None

    expected = []
    for a, b in tables.perturbed.view(-1, 2).tolist():
        near = [(weight[a, c], r) for (c, d), r in interaction.items() if d == b]
        near += [(weight[b, d], r) for (c, d), r in interaction.items() if c == a]
        far = [(weight[a, c] * weight[b, d], r) for (c, d), r in interaction.items()]
        effects = [
            ridge[x] if x in seen else average((weight[x, c], ridge[c]) for c in seen)
            for x in (a, b)
        ]
        expected.append(
            known.intercept[0] + 2 * known.slope[0] + sum(effects) + average(near or far)
        )
    torch.testing.assert_close(neighbours(problem, [("cosine", 0.3)]), torch.stack(expected))


def test_the_summary_compares_with_the_baseline_that_validation_prefers():
    y = normal(400, 1)

    def result(noise: float, validation: float, seed: int) -> dict:
        prediction = y + noise * normal(400, 1, seed=seed)
        r = pearson(y, prediction).item()
        return {
            "validation": validation,
            "Pearson": r,
            "MSE": 1.0,
            "seconds": 0.0,
            "y": y,
            "prediction": prediction,
        }

    noises = dict(zip(BASELINES, (3.0, 1.0, 2.0, 0.3, 2.0, 2.0, 2.0, 2.0), strict=True)) | {
        "ours, both": 0.5
    }
    splits = {
        f"random:{s}": {
            name: result(noise, 0.9 if name == "additive ridge" else 0.1, k + 10 * s + 1)
            for k, (name, noise) in enumerate(noises.items())
        }
        for s in range(2)
    }
    means, each = summary("random", splits).values()
    rows = {row["contestant"]: row for row in means}
    assert len(each) == 2 * len(noises) and rows["additive ridge"]["difference"] == 0
    ours = rows["ours, both"]
    assert ours["2.5 %"] < ours["difference"] < ours["97.5 %"] and ours["2.5 %"] > 0
    assert ours["mean"] == pytest.approx((ours["random:0"] + ours["random:1"]) / 2)
    assert ours["spread"] == pytest.approx(abs(ours["random:0"] - ours["random:1"]) / math.sqrt(2))
    gains = bootstrap(splits["random:0"], best=1)[:, -1]
    single = next(row for row in each if row["contestant"] == "ours, both")
    assert single["2.5 %"] == pytest.approx(gains.quantile(0.025).item())


def test_the_noise_ceiling_of_a_preset_is_a_contestant(tmp_path, monkeypatch):
    """It and the ridge have the figures of README.md."""
    monkeypatch.setattr(quality, "BASELINES", {"additive ridge": BASELINES["additive ridge"]})
    arguments = [
        "--preset=small",
        f"--dir={tmp_path}",
        f"data.cache_dir={tmp_path}/cache",
        "--config=/dev/null",
    ]
    results = quality.contest(
        "random:0", quality.parse_arguments([*arguments, "--models"]), env=None
    )
    rounded = {name: round(figures["Pearson"], 3) for name, figures in results.items()}
    assert rounded == {"additive ridge": 0.772, "noise ceiling": 0.934}


def test_the_mean_of_several_seeds_is_a_contestant(tmp_path, monkeypatch):
    """Members that err independently of each other are better together."""
    tables = data.load(DataConfig(cache_dir=str(tmp_path)))

    def ours(name, overrides, options, env):
        seed = int(dict(override.split("=") for override in overrides)["run.seed"])
        return tables.y + normal(len(tables.y), seed=seed).unsqueeze(1), 2.0

    monkeypatch.setattr(quality, "BASELINES", {"additive ridge": BASELINES["additive ridge"]})
    monkeypatch.setattr(quality, "ours", ours)
    arguments = [
        f"--config={os.devnull}",
        f"data.cache_dir={tmp_path}",
        "--models",
        "local",
        "--seeds",
        "3",
    ]
    results = quality.contest("random:0", quality.parse_arguments(arguments), env=None)
    names = [
        "additive ridge",
        *(f"ours, local, seed {seed}" for seed in range(3)),
        "ours, local, all 3",
    ]
    assert list(results) == names and results[names[-1]]["seconds"] == 6.0
    assert (
        min(results[names[-1]]["Pearson"] - results[name]["Pearson"] for name in names[1:4]) > 0.05
    )


@pytest.mark.parametrize("split", ["random", "nodes"])
def test_permuted_names_change_nothing_but_the_graph(tmp_path, split):
    config = config.Config(data=DataConfig(split=split, cache_dir=str(tmp_path)))
    overrides = permute_names(config, tmp_path)
    options = dict(override.removeprefix("data.").split("=") for override in overrides)
    before, after = data.load(config.data), data.load(replace(config.data, **options))
    assert (
        Path(options["edges"]).parent == tmp_path
        and Path(options["perturbations"]) == data.EXAMPLE / "scores.tsv"
    )
    for name in ("genes", "relations"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("perturbed", "perturbed_ptr", "y", "split"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    for old, new in zip(
        before.graph().edge_index_dict.values(), after.graph().edge_index_dict.values(), strict=True
    ):
        degrees = [torch.bincount(edges[0], minlength=400) for edges in (old, new)]
        assert not torch.equal(*degrees) and torch.equal(
            *(degree.sort().values for degree in degrees)
        )
