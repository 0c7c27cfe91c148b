"""Profiles, which have a score for each node: tables from AnnData, training, and predictions."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_tables import read_tables
from tests.bench.synthetic import PRESETS, generate, write
from tests.template.fixtures import ROOT, write_table
from tests.template.tables import sets_of
from tests.tools.runs import read_metrics

pytestmark = pytest.mark.slow  # run with --all, or by name

RELATIONS = ("activates", "represses", "binds")
SMALL = replace(
    PRESETS["expression"],
    num_nodes=60,
    num_edges=dict.fromkeys(RELATIONS, 150),
    num_samples=70,
    num_doubles=20,
)


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
    assert set(tables.targets) <= set(tables.genes)
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


def test_training_on_profiles_starts_from_the_baseline(train, profile_tables, tmp_path):
    enough_rows = "data.val_fraction=0.2"  # to distinguish the epochs by their metrics
    result = train(0, *profile_tables, *NODES, enough_rows).check()
    assert re.search(r"; 60 scores: G00001, G00002, G00003, G00004, G00005; ", result.stdout)
    pattern = r"val loss .*, Pearson -?\d\.\d{4}, baseline -?\d\.\d{4}\n"
    assert re.search(pattern, result.stdout)
    assert "note" not in result.stdout
    first, *_, last = read_metrics(tmp_path / "runs/nodes", "val")
    assert first["pearson"] == pytest.approx(first["baseline_pearson"], abs=1e-6)
    assert last["pearson"] > first["pearson"]


def test_profiles_do_not_depend_on_the_route_or_the_number_of_processes(
    train, profile_tables, tmp_path
):
    options = [*profile_tables, *NODES, "optim.precision=fp64"]
    models = []
    for nproc, route in ((0, "expanded"), (0, "shared"), (2, "reach"), (2, "auto")):
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
