"""Synthetic tables: they have the declared shape, and their scores depend on the graph."""

import math

import pytest
import torch

from data import DataConfig, load, random_split
from metrics import pearson
from tests.bench import synthetic
from tests.bench.synthetic import PRESETS, RULES, failure_losses, generate, synthetic_tables
from tests.sets import pack_sets
from tests.template.fixtures import DEFAULTS, write_defaults
from train import read_config


def test_the_example_has_the_tables_of_the_preset_small(tmp_path, monkeypatch):
    """Only the rounding of scores and the order of edges differ, in any working directory."""
    monkeypatch.chdir(tmp_path)
    example = load(DataConfig())
    expected = synthetic_tables(PRESETS["small"])
    for name in ("genes", "relations", "targets"):
        assert list(getattr(example, name)) == list(getattr(expected, name))
    for name in ("perturbed", "perturbed_ptr"):
        assert torch.equal(getattr(example, name), getattr(expected, name))
    assert torch.equal(example.split, random_split(expected, DataConfig()))
    torch.testing.assert_close(example.y, expected.y, rtol=5.1e-11, atol=1e-12)  # 11 digits
    found = example.graph().edge_index_dict.values()
    drawn = expected.graph().edge_index_dict.values()
    for edge_index, drawn_edge_index in zip(found, drawn, strict=True):
        assert edge_index.T.tolist() == sorted(drawn_edge_index.T.tolist())


@pytest.mark.slow
def test_train_reads_the_tables_that_synthetic_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["synthetic", "network", str(tmp_path / "new/tables")])
    synthetic.main()
    write_defaults(tmp_path)
    overrides = [*capsys.readouterr().out.split(), f"data.cache_dir={tmp_path}"]
    config = read_config([*overrides, "--config", str(tmp_path / DEFAULTS)])
    tables = load(config.data)
    expected = synthetic_tables(PRESETS["network"])
    assert torch.equal(tables.perturbed_ptr, expected.perturbed_ptr)
    assert torch.equal(tables.perturbed, expected.perturbed)
    torch.testing.assert_close(tables.y, expected.y, rtol=5.1e-11, atol=1e-12)
    assert tables.edge_type.bincount().tolist() == expected.edge_type.bincount().tolist()


@pytest.mark.parametrize(
    "preset", ["small", "network", "planted", pytest.param("yeast", marks=pytest.mark.slow)]
)
def test_a_preset_has_the_declared_shape(preset):
    compare_with_preset(preset)


def compare_with_preset(preset: str) -> None:
    """Asserts that the tables of a preset have its sizes, and scores with little noise."""
    shape = PRESETS[preset]
    tables, signal = generate(shape)
    tables.split = random_split(tables, DataConfig())
    assert len(tables.genes) == shape.num_nodes
    num_edges = tables.edge_type.bincount().tolist()
    assert dict(zip(tables.relations, num_edges, strict=True)) == shape.num_edges
    for source, target in tables.graph().edge_index_dict.values():
        assert (source != target).all()
        assert len((source * shape.num_nodes + target).unique()) == len(source)
    counts = tables.perturbed_ptr.diff()
    assert (counts.min(), counts.max()) == shape.deletions
    degree = torch.bincount(tables.edge_index.flatten(), minlength=shape.num_nodes)
    assert degree.max() > 5 * degree.float().mean()  # hubs
    assert preset != "yeast" or degree.max() > 5000
    rows = tables.rows("test")
    assert 0.85 < pearson(tables.y[rows], signal[rows, None]).item() < 0.99


def test_failures_spread_as_in_a_loop_over_nodes():
    edge_indices = [
        torch.tensor([[0, 1, 2, 3], [2, 2, 3, 4]]),
        torch.tensor([[0, 4, 5], [3, 5, 4]]),
    ]
    sets = [[], [0], [0, 1], [2, 5]]
    losses = failure_losses(edge_indices, 6, *pack_sets(sets), rounds=3)
    suppliers = [[] for _ in range(6)]  # the suppliers of each node, and their weights
    for relation, edge_index in enumerate(edge_indices):
        for source, target in edge_index.T.tolist():
            suppliers[target].append((source, 0.5**relation))

    def lost(node: int, activity: list[float]) -> float:
        """Returns the share of its supplies that a node has lost, from 0 to 1."""
        total = sum(weight for _, weight in suppliers[node])
        missing = sum(weight * (1 - activity[source]) for source, weight in suppliers[node])
        return missing / (total or 1)

    def activities(dead: list[int]) -> list[float]:
        activity = [float(node not in dead) for node in range(6)]
        for _ in range(3):
            next_activity = []
            for node in range(6):
                alive = float(node not in dead)
                next_activity.append(alive / (1 + math.exp(-12 * (0.4 - lost(node, activity)))))
            activity = next_activity
        return activity

    intact = activities([])
    for loss, dead in zip(losses.tolist(), sets, strict=True):
        activity = activities(dead)
        expected = sum(intact[node] - activity[node] for node in range(6) if node not in dead)
        assert loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("planted")])
def test_planted_scores_are_sums_of_effects_and_counts(preset):
    tables, signal = generate(PRESETS[preset])
    neighbours = [set() for _ in tables.genes]
    targets = [set() for _ in tables.genes]
    sources = [set() for _ in tables.genes]
    for (a, b), relation in zip(tables.edge_index.T.tolist(), tables.edge_type, strict=True):
        if tables.relations[relation] == "physical":
            neighbours[a].add(b)
            neighbours[b].add(a)
        else:
            targets[a].add(b)
            sources[b].add(a)
    counts = {
        "common neighbours": lambda a, b: len(neighbours[a] & neighbours[b]),
        "common targets": lambda a, b: len(targets[a] & targets[b]),
        "edge": lambda a, b: int(b in neighbours[a]),
        "paths of two": lambda a, b: len(targets[a] & sources[b]) + len(targets[b] & sources[a]),
    }
    pairs = tables.perturbed.view(-1, 2)
    rules = PRESETS[preset].rules
    of_rules = [[counts[rule](a, b) for rule in rules] for a, b in pairs.tolist()]
    count = torch.tensor(of_rules, dtype=torch.float64)
    assert ((count > 0).double().mean(dim=0) > 0.3).all()  # for at least 30 % of the pairs

    is_knocked_out = torch.zeros(len(pairs), len(tables.genes), dtype=torch.float64)
    is_knocked_out.scatter_(1, pairs, 1.0)
    terms = torch.cat([is_knocked_out, count], dim=1)
    solution = torch.linalg.lstsq(terms, signal.unsqueeze(1), driver="gelsd").solution
    torch.testing.assert_close((terms @ solution).squeeze(1), signal)
    effect_of_nodes, effect_of_rules = solution.split([len(tables.genes), len(rules)])
    signs = torch.tensor([RULES[rule] for rule in rules]).sign()
    assert torch.equal(effect_of_rules.sign().flatten(), signs.double())
    assert (is_knocked_out @ effect_of_nodes).std().item() == pytest.approx(1)
    assert (count @ effect_of_rules).std().item() == pytest.approx(1)


def test_synthetic_tables_depend_only_on_their_seed():
    one, same, other = (synthetic_tables(PRESETS["small"], seed) for seed in (0, 0, 1))
    for tables in (one, same, other):
        tables.split = random_split(tables, DataConfig())
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
