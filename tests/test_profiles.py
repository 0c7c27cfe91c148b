"""Profiles, a score per node: the synthetic ones, and tests.bench.quality's rivals for them."""

import copy
import itertools
import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch

import data
import tables
import train as train_module
from data import DataConfig
from errors import UserError
from tables import Tables
from tests.bench import profiles, quality, synthetic
from tests.bench.profiles import (
    RIVALS,
    Paths,
    Profiles,
    edge_paths,
    low_rank,
    mean_profile,
    neighbours,
)
from tests.bench.synthetic import PRESETS, generate, regulations, write
from tests.conftest import ROOT, write_table
from tests.tools.runs import difference, pack_sets, read_metrics

RELATIONS = ("activates", "represses", "binds")
SMALL = replace(
    PRESETS["expression"], num_nodes=60, num_edges=dict.fromkeys(RELATIONS, 150), num_samples=70
)
SMALL = replace(SMALL, num_doubles=20)


def make_tables(split: str = "random", seed: int = 0) -> Tables:
    tables, _ = generate(SMALL, seed)
    make_split = data.node_split if split == "nodes" else data.random_split
    tables.split = make_split(tables, DataConfig(split=split, val_fraction=0.2, test_fraction=0.2))
    return tables


def sets_of(tables: Tables) -> list[list[int]]:
    return [
        nodes.tolist() for nodes in tables.perturbed.split(tables.perturbed_ptr.diff().tolist())
    ]


def error_on_test_rows(tables: Tables, prediction: torch.Tensor) -> float:
    rows = tables.rows("test")
    return (prediction[rows] - tables.y[rows]).square().nanmean().item()


# ---- The preset ----------------------------------------------------------------------------------
def test_profiles_are_what_a_loop_over_edges_gives():
    tables, signal = generate(SMALL)
    generator = synthetic.Draw(SMALL, 0)
    generator.uniform(60)
    reaction = (generator.normal(60) / 2).exp().tolist()
    strength = [synthetic.REGULATION[relation] for relation in tables.relations]
    edges = list(zip(*tables.edge_index.tolist(), tables.edge_type.tolist(), strict=True))
    sets = sets_of(tables)
    assert any(source in dead and target in dead for source, target, _ in edges for dead in sets)
    for row, dead in enumerate(sets):
        first = [0.0] * 60
        for source, target, r in edges:
            if source in dead and target not in dead:
                first[target] += strength[r] * reaction[target]
        total = list(first)
        for source, target, r in edges:
            total[target] -= 0.3 * math.tanh(first[source]) * strength[r] * reaction[target]
        expected = 1.5 * (torch.tensor(total, dtype=torch.float64) / 2).tanh()
        torch.testing.assert_close(signal[row], expected)
    noise = tables.y - signal
    assert 0.045 < noise[~noise.isnan()].std() < 0.055


def test_samples_are_singles_then_pairs_of_them_without_their_own_scores():
    tables, _ = generate(SMALL)
    sets = sets_of(tables)
    singles = [nodes[0] for nodes in sets[:50]]
    assert [len(nodes) for nodes in sets] == [1] * 50 + [2] * 20
    assert len(set(singles)) == 50 and {node for nodes in sets for node in nodes} == set(singles)
    assert list(tables.targets) == tables.genes and tables.y.shape == (70, 60)
    assert [row.isnan().nonzero().flatten().tolist() for row in tables.y] == sets


def test_few_nodes_have_most_of_the_targets():
    draw = synthetic.Draw(SMALL, 0)
    weight = draw.uniform(2000).pow(-2 / 3) - 0.8
    edges = regulations(draw, weight, 6000)
    assert (
        edges.shape == (2, 6000)
        and len(edges.unique(dim=1).T) == 6000
        and (edges[0] != edges[1]).all()
    )
    out, into = (torch.bincount(end, minlength=2000).sort(descending=True).values for end in edges)
    assert out[:200].sum() > 2000 and into[:200].sum() < 1500 and into[0] < 20


def test_profiles_are_written_as_tables_that_train_reads(tmp_path):
    tables = make_tables()
    options = write(tables, tmp_path)
    header, first = (tmp_path / "scores.tsv").read_text().splitlines()[:2]
    assert header.split("\t") == ["genes", *tables.genes, "split"]
    assert first.split("\t").count("NA") == 1 and all(
        len(cell) <= 6 for cell in first.split("\t")[1:-1]
    )
    overrides = [*options, f"data.cache_dir={tmp_path}", "--config", os.devnull]
    read = data.load(train_module.load_config(train_module.parse_arguments(overrides)).data)
    assert read.genes == tables.genes and list(read.targets) == tables.genes
    torch.testing.assert_close(read.y, tables.y, rtol=0, atol=5.1e-4, equal_nan=True)


# ---- The rivals ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("split", ["random", "nodes"])
def test_a_rival_does_not_see_the_test_scores(name, split):
    tables = make_tables(split)
    before = RIVALS[name](Profiles(tables))
    changed = copy.deepcopy(tables)
    changed.y[changed.rows("test")] = 100.0
    assert torch.equal(RIVALS[name](Profiles(changed)), before)
    assert (
        before.shape == tables.y.shape and before.dtype == torch.float64 and before.isfinite().all()
    )


def test_effects_are_a_ridge_regression_of_each_target_on_the_rows_that_have_it():
    tables = make_tables()
    tables.y[torch.rand(70, 60, generator=torch.Generator().manual_seed(0)) < 0.2] = math.nan
    problem = Profiles(tables)
    found = problem.effect(0.3)
    member = torch.zeros(70, len(problem.nodes), dtype=torch.float64)
    member[problem.row, problem.member] = 1
    for t in range(0, 60, 6):
        rows = problem.train & ~tables.y[:, t].isnan()
        x, y = member[rows], tables.y[rows, t]
        identity = torch.eye(len(problem.nodes), dtype=torch.float64)
        expected = torch.linalg.solve(x.T @ x + 0.3 * identity, x.T @ (y - y.mean()))
        torch.testing.assert_close(found[:, t].double(), expected, rtol=1e-3, atol=1e-4)
    assert (found[~problem.seen] == 0).all() and not problem.seen.all()


@pytest.mark.parametrize("rival", [neighbours, low_rank])
def test_an_unseen_gene_has_the_profile_of_its_neighbours(rival):
    """Twins have the same targets in the graph and the same profile, one of three kinds."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randn(3, 36, dtype=torch.float64, generator=generator)
    y = kinds[torch.arange(36) % 3] + 0.3 * torch.randn(
        36, 36, dtype=torch.float64, generator=generator
    )
    genes = [f"G{i:02d}" for i in range(36)]
    targets = torch.tensor([[kind, kind + 3] for kind in range(3)])[torch.arange(36) % 3]
    edges = torch.stack([torch.arange(36).repeat_interleave(2), targets.flatten()])
    tables = Tables(
        genes,
        ["r"],
        edges,
        torch.zeros(72).long(),
        *pack_sets([[i] for i in range(36)]),
        y,
        targets=genes,
    )
    tables.split = data.node_split(tables, DataConfig(split="nodes", test_fraction=0.2))
    mean = error_on_test_rows(tables, mean_profile(Profiles(tables)))
    assert error_on_test_rows(tables, rival(Profiles(tables))) < 0.2 * mean
    no_edges = {"edge_index": edges[:, :0], "edge_type": tables.edge_type[:0]}
    nothing = replace(tables, **no_edges, edge_weight=None, edge_attr=None)
    assert error_on_test_rows(tables, rival(Profiles(nothing))) > 0.8 * mean


@pytest.mark.parametrize("exponents", [(0.0, 0.0), (0.5, 1.0)])
def test_paths_equal_a_plain_loop(exponents):
    tables = make_tables()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:40]
    tables.targets = [tables.genes[node] for node in order]
    tables.y = tables.y[:, order]
    tables.edge_weight = torch.rand(len(tables.edge_type), dtype=torch.float64) + 0.5
    rows = torch.tensor([3, 60, 41])
    tables.edge_index[:, 0] = torch.tensor(sets_of(tables)[60])  # between two that are knocked out
    found = Paths(Profiles(tables), exponents).features(rows)
    degrees = [torch.bincount(end, minlength=60).tolist() for end in tables.edge_index]
    edges = []
    for (source, target), r, weight in zip(
        tables.edge_index.T.tolist(), tables.edge_type, tables.edge_weight, strict=True
    ):
        scale = degrees[0][source] ** exponents[0] * degrees[1][target] ** exponents[1]
        edges.append((source, target, int(r), weight.item() / scale))
    expected = torch.zeros(12, 60, 3)
    for k, row in enumerate(rows):
        dead = sets_of(tables)[row]
        for (i, j, r, value), (a, b, s, other) in itertools.product(edges, edges):
            if i in dead and j == a and j not in dead:
                expected[3 + 3 * s + r, b, k] += value * other
        for i, j, r, value in edges:
            expected[r, j, k] += value * (i in dead)
    torch.testing.assert_close(found, expected.transpose(0, 1)[order])


def test_paths_explain_scores_that_are_sums_of_them():
    """Each target has a scale of its own, which only the shrinkage allows for."""
    tables = make_tables()
    problem = Profiles(tables)
    features = Paths(problem, (0.0, 0.0)).features(torch.arange(70)).double()
    weight = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale = torch.linspace(0.5, 2, 60).double()
    y = 3 + scale * torch.einsum("tfn,f->nt", features, weight)
    tables.y = y.where(~tables.y.isnan(), torch.nan)
    mean = error_on_test_rows(tables, mean_profile(Profiles(tables)))
    assert error_on_test_rows(tables, edge_paths(Profiles(tables))) < 0.01 * mean
    shared = Paths(Profiles(tables), (0.0, 0.0)).predict(torch.arange(70), 1e-6, float("inf"))
    assert 0.01 * mean < error_on_test_rows(tables, shared) < 0.5 * mean


# ---- The study -----------------------------------------------------------------------------------
def test_the_study_has_a_table_of_genes_and_one_of_profiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "expression", SMALL)
    arguments = [f"--config={os.devnull}", "--preset=expression", f"--dir={tmp_path}"]
    arguments += [f"data.cache_dir={tmp_path}/cache", "--models"]
    arguments += ["--splits", "random:0", "nodes:1", f"--json={tmp_path}/study.json"]
    monkeypatch.setattr("sys.argv", ["quality", *arguments])
    quality.main()
    study = json.loads((tmp_path / "study.json").read_text())["tables"]
    titles = list(study)
    genes, _, rows, each_row = list(study.values())[:4]
    assert re.fullmatch(
        r"Splits by random: Pearson on \d+ test rows, .* difference to 'edge paths'", titles[0]
    )
    assert re.fullmatch(
        r"Splits by nodes: Pearson over the scores of each of 16 test rows, .*", titles[6]
    )
    assert len(set(titles)) == 8
    assert [row["contestant"] for row in genes] == [*RIVALS, "noise ceiling"]
    ceiling, best = (
        next(row for row in rows if row["contestant"] == name)
        for name in ("noise ceiling", "edge paths")
    )
    tables, signal = generate(SMALL)
    tables.split = data.random_split(tables, DataConfig())
    test = tables.rows("test")
    expected = train_module.pearson(tables.y[test].T, signal[test].T).mean().item()
    assert (
        ceiling["mean"] == ceiling["random:0"] == pytest.approx(expected, abs=0.01)
    )  # scores have three decimals
    assert ceiling["2.5 %"] < ceiling["difference"] == pytest.approx(ceiling["mean"] - best["mean"])
    assert {"row validation", "row Pearson"} <= each_row[0].keys()
    for row in itertools.chain(*study.values()):
        assert (
            row["2.5 %"] <= row["difference"] + 1e-9 and row["difference"] <= row["97.5 %"] + 1e-9
        )
    assert "of profiles" in capsys.readouterr().err


def test_intervals_of_the_study_hold_the_difference_though_few_rows_change_a_score():
    """A resample without the row that changes a score has nothing to find there."""
    signal = 3 * torch.eye(60, dtype=torch.float64)
    noise = torch.randn(2, 60, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = replace(
        make_tables(),
        y=signal + 0.5 * noise[0],
        split=torch.tensor([1, 2]).repeat_interleave(30).char(),
    )
    predictions = {"mean profile": noise[1], "edge paths": signal}
    results = {
        name: quality.result(tables, x) | {"seconds": 0.0} for name, x in predictions.items()
    }
    means, _ = quality.summary("random", {"random:0": results}).values()
    assert means[0]["2.5 %"] < means[0]["difference"] < means[0]["97.5 %"] < -0.2
    assert means[1]["difference"] == 0


def test_the_study_refuses_several_scores_that_are_no_profile(tmp_path, monkeypatch):
    tables = make_tables()
    tables.targets, tables.y = ["fitness", "size"], tables.y[:, :2]
    overrides = [*write(tables, tmp_path), f"data.cache_dir={tmp_path}", "--config", "/dev/null"]
    with pytest.raises(
        UserError, match="takes one score, or scores that are named after nodes of the graph"
    ):
        quality.contest("random:0", quality.parse_arguments(overrides), env=None)


# ---- From AnnData --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["dense", "csr_matrix", "csr_array"])
def test_the_block_of_the_readme_turns_a_screen_into_a_table(tmp_path, monkeypatch, layout):
    """The gene X of the graph is not measured; the measured gene Z is not in the graph."""
    anndata = pytest.importorskip("anndata")  # whose dependencies are imported here, too
    import numpy as np
    import pandas
    import scipy.sparse

    monkeypatch.chdir(tmp_path)
    rows = [
        ("source", "target", "relation"),
        ("A", "B", "r"),
        ("B", "C", "r"),
        ("X", "A", "r"),
        ("NA", "C", "r"),
    ]
    write_table(tmp_path / "edges.tsv", rows)
    kinds = ["control", "B+A", "A", "control", "A", "C", "B+A", "control", "X"]
    values = np.random.default_rng(0).random((9, 4)).astype(np.float32)
    obs = pandas.DataFrame(
        {"perturbation": pandas.Categorical(kinds, categories=["nothing", *sorted(set(kinds))])}
    )
    obs.index = obs.index.map("cell{}".format)
    x = values if layout == "dense" else getattr(scipy.sparse, layout)(values)
    screen = anndata.AnnData(x, obs=obs, var=pandas.DataFrame(index=["C", "Z", "A", "B"]))
    screen.write_h5ad("screen.h5ad")
    (block,) = re.findall(
        r"^```python\n(import anndata.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert len(block.split("\n\n")[1].splitlines()) == 6
    exec(block, {})

    tables = tables.read_tables(DataConfig(edges="edges.tsv", perturbations="scores.tsv"))
    assert list(tables.targets) == ["C", "A", "B"] and profiles.are_profiles(tables)
    found = {
        ",".join(tables.genes[node] for node in nodes): y
        for nodes, y in zip(sets_of(tables), tables.y, strict=True)
    }
    assert found.keys() == {"A", "A,B", "C", "X"}
    for genes, y in found.items():
        mean = values[[kind in (genes, "B+A" if genes == "A,B" else "") for kind in kinds]].mean(0)
        control = values[[kind == "control" for kind in kinds]].mean(0)
        torch.testing.assert_close(
            y, torch.from_numpy((mean - control)[[0, 2, 3]]).double(), rtol=1e-3, atol=1e-6
        )


# ---- Training ------------------------------------------------------------------------------------
NODES = [
    "model.readout=nodes",
    "run.name=nodes",
    "optim.epochs=2",
    "data.batch_size=12",
    "model.dropout=0",
]


@pytest.fixture
def profile_tables(tmp_path) -> list[str]:
    """Options of train.py that name the tables of a small compendium.

    Its last column is that of the first gene.
    """
    tables, _ = generate(SMALL)
    options = write(tables, tmp_path / "profiles")
    rows = [
        line.split("\t") for line in (tmp_path / "profiles/scores.tsv").read_text().splitlines()
    ]
    write_table(tmp_path / "profiles/scores.tsv", [(row[0], *row[2:], row[1]) for row in rows])
    return options


def test_training_on_profiles_starts_at_the_baseline_and_is_resumed_bit_for_bit(
    train, profile_tables, tmp_path
):
    options = [*profile_tables, *NODES, "checkpoint.every_steps=1", "checkpoint.keep_last=99"]
    result = train(3, *options).check()
    assert re.search(r"; 60 scores: G00001, G00002, G00003, G00004, G00005\n", result.stdout)
    assert re.search(
        r"val loss .*, Row_Pearson -?\d\.\d{4}, additive baseline -?\d\.\d{4}\n", result.stdout
    )
    assert "note" not in result.stdout
    first, *_, last = read_metrics(tmp_path / "runs/nodes", "val")
    for key in ("pearson", "row_pearson"):
        assert first[key] == pytest.approx(first[f"baseline_{key}"], abs=1e-6)
        assert last[key] > first[key]

    shutil.copytree(tmp_path / "runs/nodes", tmp_path / "runs/again")
    first, *later = sorted((tmp_path / "runs/again/checkpoints").glob("step_*.pt"))
    for path in later:
        path.unlink()
    assert (
        f"resumed at step {int(first.stem[5:])}\n"
        in train(3, *options, "run.name=again").check().stdout
    )
    assert difference(tmp_path / "runs/nodes", tmp_path / "runs/again") == ""


def test_profiles_do_not_depend_on_the_route_or_the_number_of_processes(
    train, profile_tables, tmp_path
):
    options = [*profile_tables, *NODES, "optim.precision=fp64"]
    for nproc, route in ((0, "expanded"), (1, "shared"), (2, "reach"), (2, "auto")):
        train(
            nproc, *options, f"model.message_passing={route}", f"run.name={nproc}-{route}"
        ).check()
    reference = torch.load(tmp_path / "runs/0-expanded/checkpoints/best.pt", weights_only=True)[
        "model"
    ]
    for name in ("1-shared", "2-reach", "2-auto"):
        found = torch.load(tmp_path / f"runs/{name}/checkpoints/best.pt", weights_only=True)[
            "model"
        ]
        for key, tensor in reference.items():
            torch.testing.assert_close(
                found[key], tensor, rtol=1e-8, atol=1e-8, msg=f"{name}: {key}"
            )


def test_a_profile_is_predicted_with_seven_digits(train, profile_tables, tmp_path):
    train(0, *profile_tables, *NODES).check()
    best = "runs/nodes/checkpoints/best.pt"
    train(0, "--predict=all-singles", f"--checkpoint={best}", *profile_tables, *NODES).check()
    header, *lines = (tmp_path / "all-singles.predictions.tsv").read_text().splitlines()
    assert (
        header.split("\t")[:2] == ["genes", "G00001"]
        and header.endswith("\tG00000")
        and len(lines) == 60
    )
    cells = [cell for line in lines for cell in line.split("\t")[1:]]
    assert (
        len(cells) == 60 * 60
        and max(len(cell.strip("-").replace(".", "").lstrip("0")) for cell in cells) <= 11
    )


def test_scores_that_are_no_nodes_and_profiles_for_another_readout_are_named(
    train, profile_tables, tmp_path
):
    result = train(0, *profile_tables, "optim.epochs=1").check()
    assert (
        "note      all scores are named after nodes: model.readout=nodes suits them"
        in result.stdout
    )
    path = tmp_path / "profiles/scores.tsv"
    path.write_text(path.read_text().replace("\tG00007\t", "\tYAL1\t", 1))
    result = train(2, *profile_tables, *NODES)
    assert result.returncode == 2
    assert (
        result.stderr.count(
            "error: the score 'YAL1' is no node of the graph, which model.readout=nodes needs"
        )
        == 1
    )
