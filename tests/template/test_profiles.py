"""Profiles, which have a score for each node: synthetic tables, rivals, a study, and training."""

import copy
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analyse_metrics import pearson_of_rows
from data import DataConfig, load, node_split, random_split
from data_cells import SPLITS
from data_tables import Tables, read_tables
from errors import UserError
from tests.bench import profiles, quality, synthetic
from tests.bench.profiles import (
    RIVALS,
    Paths,
    Profiles,
)
from tests.bench.synthetic import PRESETS, generate, write
from tests.template.fixtures import DEFAULTS, ROOT, write_defaults, write_table
from tests.template.tables import sets_of
from tests.tools.runs import difference, read_metrics
from train import read_config

pytestmark = pytest.mark.slow  # run with --all, or by name

RELATIONS = ("activates", "represses", "binds")
SMALL = replace(
    PRESETS["expression"],
    num_nodes=60,
    num_edges=dict.fromkeys(RELATIONS, 150),
    num_samples=70,
    num_doubles=20,
)


def make_tables(split: str = "random", seed: int = 0) -> Tables:
    tables, _ = generate(SMALL, seed)
    options = DataConfig(split=split, val_fraction=0.2, test_fraction=0.2)
    make_split = node_split if split == "nodes" else random_split
    tables.split = make_split(tables, options)
    return tables


# ---- The preset ----------------------------------------------------------------------------------
def test_synthetic_profiles_equal_a_loop_over_edges():
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


def test_samples_are_single_nodes_then_pairs_and_lack_the_scores_of_these_nodes():
    tables, _ = generate(SMALL)
    sets = sets_of(tables)
    singles = [nodes[0] for nodes in sets[:50]]
    assert [len(nodes) for nodes in sets] == [1] * 50 + [2] * 20
    assert len(set(singles)) == 50
    assert {node for nodes in sets for node in nodes} == set(singles)
    assert list(tables.targets) == tables.genes
    assert tables.y.shape == (70, 60)
    assert [row.isnan().nonzero().flatten().tolist() for row in tables.y] == sets


def test_train_reads_the_written_tables_of_profiles(tmp_path):
    tables = make_tables()
    options = write(tables, tmp_path)
    header, first = (tmp_path / "scores.tsv").read_text().splitlines()[:2]
    assert header.split("\t") == ["genes", *tables.genes, "split"]
    cells = first.split("\t")[1:-1]
    assert cells.count("NA") == 1
    assert all(len(cell) <= 6 for cell in cells)
    write_defaults(tmp_path)
    overrides = [*options, f"data.cache_dir={tmp_path}", "--config", str(tmp_path / DEFAULTS)]
    read = load(read_config(overrides).data)
    assert read.genes == tables.genes
    assert list(read.targets) == tables.genes
    torch.testing.assert_close(read.y, tables.y, rtol=0, atol=5.1e-4, equal_nan=True)


# ---- The rivals ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("split", ["random", "nodes"])
def test_a_rival_does_not_use_the_test_scores(name, split):
    tables = make_tables(split)
    before = RIVALS[name](Profiles(tables))
    changed = copy.deepcopy(tables)
    changed.y[changed.rows("test")] = 100.0
    assert torch.equal(RIVALS[name](Profiles(changed)), before)
    assert before.shape == tables.y.shape
    assert before.dtype == torch.float64
    assert before.isfinite().all()


@pytest.mark.parametrize("exponents", [(0.0, 0.0), (0.5, 1.0)])
def test_paths_equal_a_plain_loop(exponents):
    tables = make_tables()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:40]
    tables.targets = [tables.genes[node] for node in order]
    tables.y = tables.y[:, order]
    tables.edge_weight = torch.rand(len(tables.edge_type), dtype=torch.float64) + 0.5
    rows = torch.tensor([3, 60, 41])
    tables.edge_index[:, 0] = torch.tensor(sets_of(tables)[60])  # connects two deleted nodes
    found = Paths(Profiles(tables), exponents).features(rows)
    out_degree, in_degree = (torch.bincount(end, minlength=60) for end in tables.edge_index)
    source, target = tables.edge_index
    scale = out_degree[source] ** exponents[0] * in_degree[target] ** exponents[1]
    values = (tables.edge_weight / scale).tolist()
    edges = list(
        zip(source.tolist(), target.tolist(), tables.edge_type.tolist(), values, strict=True)
    )
    expected = torch.zeros(12, 60, 3)
    for k, row in enumerate(rows):
        dead = sets_of(tables)[row]
        for first, second in itertools.product(edges, edges):
            i, j, r, value = first
            a, b, s, other = second
            if i in dead and j == a and j not in dead:
                expected[3 + 3 * s + r, b, k] += value * other
        for i, j, r, value in edges:
            expected[r, j, k] += value * (i in dead)
    torch.testing.assert_close(found, expected.transpose(0, 1)[order])


# ---- The study -----------------------------------------------------------------------------------
def row_of(rows: list[dict], contestant: str) -> dict:
    """Returns the row of a contestant in a table of the study."""
    (row,) = (row for row in rows if row["contestant"] == contestant)
    return row


def test_the_study_has_tables_for_genes_and_for_profiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "expression", SMALL)
    write_defaults(tmp_path)
    arguments = [
        f"--config={tmp_path / DEFAULTS}",
        "--preset=expression",
        f"--dir={tmp_path}",
        f"--json={tmp_path}/study.json",
        f"data.cache_dir={tmp_path}/cache",
        "--models",
        "--splits",
        "random:0",
        "nodes:1",
    ]
    monkeypatch.setattr("sys.argv", ["quality", *arguments])
    quality.main()
    study = json.loads((tmp_path / "study.json").read_text())["tables"]
    titles = list(study)
    assert len(titles) == 8
    pattern = r"Splits by random: Pearson on \d+ test rows, .* difference to 'edge paths'"
    assert re.fullmatch(pattern, titles[0])
    pattern = r"Splits by nodes: Pearson over the scores of each of 16 test rows, .*"
    assert re.fullmatch(pattern, titles[6])
    genes, _, rows, each_row = list(study.values())[:4]
    assert [row["contestant"] for row in genes] == [*RIVALS, "noise ceiling"]
    ceiling = row_of(rows, "noise ceiling")
    best = row_of(rows, "edge paths")
    tables, signal = generate(SMALL)
    test = random_split(tables, DataConfig()) == SPLITS.index("test")
    expected = pearson_of_rows(tables.y[test], signal[test]).mean().item()
    assert ceiling["mean"] == pytest.approx(expected, abs=0.01)  # scores are rounded to 3 decimals
    assert ceiling["random:0"] == ceiling["mean"]
    assert ceiling["difference"] == pytest.approx(ceiling["mean"] - best["mean"])
    assert ceiling["2.5 %"] < ceiling["difference"]
    assert {"row validation", "row Pearson"} <= each_row[0].keys()
    for row in itertools.chain(*study.values()):
        assert row["2.5 %"] <= row["difference"] + 1e-9
        assert row["difference"] <= row["97.5 %"] + 1e-9
    assert "over the scores of a row" in capsys.readouterr().err


def test_the_study_refuses_several_scores_that_are_not_a_profile(tmp_path):
    tables = make_tables()
    tables.targets = ["fitness", "size"]
    tables.y = tables.y[:, :2]
    write_defaults(tmp_path)
    arguments = [*write(tables, tmp_path), f"data.cache_dir={tmp_path}"]
    arguments += ["--config", str(tmp_path / DEFAULTS)]
    with pytest.raises(UserError, match="several scores that are not nodes"):
        quality.contest("random:0", quality.parse_arguments(arguments), ddp=None)


# ---- From AnnData --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["dense", "csr_array"])
def test_the_code_in_docs_tables_converts_a_screen_into_a_table(tmp_path, monkeypatch, layout):
    """The gene X of the graph is not measured, and the measured gene Z is not in the graph."""
    anndata = pytest.importorskip("anndata")  # its dependencies are imported below
    import numpy as np
    import pandas
    import scipy.sparse

    monkeypatch.chdir(tmp_path)
    rows = [
        ("source", "target", "relation"),
        ("A", "B", "r"),
        ("B", "C", "r"),
        ("X", "A", "r"),
        ("Y", "C", "r"),
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
    page = (ROOT / "docs/tables.md").read_text()
    (block,) = re.findall(r"^```python\n(import anndata.*?)^```$", page, re.M | re.S)
    assert len(block.split("\n\n")[1].splitlines()) == 6
    exec(block, {})

    tables = read_tables("edges.tsv", "scores.tsv", features="", scores=(), undirected=False)
    assert list(tables.targets) == ["C", "A", "B"]
    assert profiles.are_profiles(tables)
    found = {}
    for nodes, y in zip(sets_of(tables), tables.y, strict=True):
        found[",".join(tables.genes[node] for node in nodes)] = y
    assert found.keys() == {"A", "A,B", "C", "X"}
    control = values[[kind == "control" for kind in kinds]].mean(0)
    for genes, y in found.items():
        kind = "B+A" if genes == "A,B" else genes
        mean = values[[kind_of_cell == kind for kind_of_cell in kinds]].mean(0)
        expected = torch.from_numpy((mean - control)[[0, 2, 3]]).double()
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-6)


# ---- Training ------------------------------------------------------------------------------------
NODES = [
    "model.readout=nodes",
    "run.name=nodes",
    "optim.epochs=2",
    "data.batch_size=12",
    "model.dropout=0",
]


@pytest.fixture
def profile_tables(tmp_path: Path) -> list[str]:
    """Writes a small table of profiles and edges; returns options of train.py with these tables.

    The last score is for the first gene, so that scores and genes have different orders.
    """
    tables, _ = generate(SMALL)
    options = write(tables, tmp_path / "profiles")
    path = tmp_path / "profiles/scores.tsv"
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    write_table(path, [(row[0], *row[2:], row[1]) for row in rows])
    return options


def test_training_on_profiles_starts_from_the_baseline_and_resumes_bit_for_bit(
    train, profile_tables, tmp_path
):
    options = [*profile_tables, *NODES, "checkpoint.every_steps=1", "checkpoint.keep_last=99"]
    options.append(
        "data.val_fraction=0.2"
    )  # enough rows to distinguish the epochs by their metrics
    result = train(3, *options).check()
    assert re.search(r"; 60 scores: G00001, G00002, G00003, G00004, G00005; ", result.stdout)
    pattern = r"val loss .*, Pearson -?\d\.\d{4}, baseline -?\d\.\d{4}\n"
    assert re.search(pattern, result.stdout)
    assert "note" not in result.stdout
    first, *_, last = read_metrics(tmp_path / "runs/nodes", "val")
    assert first["pearson"] == pytest.approx(first["baseline_pearson"], abs=1e-6)
    assert last["pearson"] > first["pearson"]

    shutil.copytree(tmp_path / "runs/nodes", tmp_path / "runs/again")
    first, *later = sorted((tmp_path / "runs/again/checkpoints").glob("step_*.pt"))
    for path in later:
        path.unlink()
    resumed = train(3, *options, "run.name=again").check()
    assert f"resumed at step {int(first.stem[5:])}\n" in resumed.stdout
    assert difference(tmp_path / "runs/nodes", tmp_path / "runs/again") == ""


def test_profiles_do_not_depend_on_the_route_or_the_number_of_processes(
    train, profile_tables, tmp_path
):
    options = [*profile_tables, *NODES, "optim.precision=fp64"]
    models = []
    for nproc, route in ((0, "expanded"), (1, "shared"), (2, "reach"), (2, "auto")):
        name = f"{nproc}-{route}"
        train(nproc, *options, f"model.message_passing={route}", f"run.name={name}").check()
        best = tmp_path / "runs" / name / "checkpoints/best.pt"
        models.append(torch.load(best, weights_only=True)["model"])
    reference, *others = models
    for model in others:
        for key, tensor in reference.items():
            torch.testing.assert_close(model[key], tensor, rtol=1e-8, atol=1e-8, msg=key)


def test_a_profile_is_predicted_for_each_node(train, predict, profile_tables, tmp_path):
    train(0, *profile_tables, *NODES).check()
    predict(0, "all-singles", "runs/nodes").check()
    header, *lines = (tmp_path / "all-singles.predictions.tsv").read_text().splitlines()
    assert header.split("\t")[:2] == ["genes", "G00001"]
    assert header.endswith("\tG00000")
    assert len(lines) == 60
    cells = [cell for line in lines for cell in line.split("\t")[1:]]
    assert len(cells) == 60 * 60
    assert all(math.isfinite(float(cell)) for cell in cells)
