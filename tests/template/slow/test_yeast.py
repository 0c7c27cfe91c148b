"""The real tables of yeast, if they are available."""

from pathlib import Path

import pytest
import torch

from baseline import additive_baseline
from data import DataConfig, load
from data_tables import Tables
from tests.template.fixtures import DEFAULTS, ROOT
from tests.template.tables import summary_of
from tests.tools.runs import read_metrics

FOLDER = ROOT.parent / "shared/data/yeast"
real = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the real tables are not in {FOLDER}")

TABLES = {
    "edges": str(FOLDER / "edges.tsv"),
    "perturbations": str(FOLDER / "digenic.tsv"),
    "undirected": True,
}


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return load(DataConfig(cache_dir=str(tmp_path), **TABLES))


@real
def test_the_tables_are_read_completely(tables):
    assert (len(tables.genes), len(tables.relations), len(tables.y)) == (4618, 6, 18152)
    assert len(tables.edge_type) == 2 * 105_022
    assert "16 of 259 knocked-out nodes isolated" in summary_of(tables)
    assert [len(tables.rows(split)) for split in ("train", "val", "test")] == [14522, 1815, 1815]
    assert tables.y.mean().item() == pytest.approx(-0.016, abs=1e-3)


@real
def test_the_additive_baseline_has_the_known_pearson(tables):
    rows = tables.rows("test")
    known = additive_baseline(tables).prediction[rows]
    pearson = torch.corrcoef(torch.cat([known, tables.y[rows]], dim=1).T)[0, 1].item()
    assert 0.17 < pearson < 0.33  # 0.25 +- 0.04 over random splits


@real
def test_training_beats_the_additive_baseline(command, tmp_path):
    settings = [f"data.{name}={value}" for name, value in TABLES.items()]
    settings += [
        "model.readout=local",
        "model.hidden=16",
        "data.batch_size=256",
        "optim.epochs=6",
        "run.name=real",
    ]
    command(2, "train.py", *settings, "--config", DEFAULTS, launcher=True, timeout=200).check()
    (test,) = read_metrics(tmp_path / "runs/real", "test")
    assert test["n"] == 1815
    assert test["pearson"] > test["baseline_pearson"] > 0.17
