"""The rivals of the model in tests.bench.baselines, and the study in tests.bench.quality."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
from config import Config
from data import DataConfig
from data_tables import Tables
from tests.bench import quality
from tests.bench.baselines import BASELINES, LEVELS, Problem
from tests.sets import pack_sets
from tests.template.fixtures import DEFAULTS, write_defaults
from tests.template.results import normal

pytestmark = pytest.mark.slow  # run with --all, or by name

NUM_GENES = 40


def make_tables(split: str) -> Tables:
    """Returns tables with 300 pairs of genes at random levels, and with edges within modules.

    A score is a sum of three products of the genes' effects. Module k of the four modules consists
    of the genes k, k + 4, ... Each gene has edges to two genes of its module.
    """
    pairs = torch.combinations(torch.arange(NUM_GENES))
    generator = torch.Generator().manual_seed(0)
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[:300]]
    perturbed, perturbed_ptr = pack_sets(pairs.tolist())
    levels = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64)
    genes = torch.arange(NUM_GENES)
    in_module = torch.cat([genes % 4, genes % 4 + 4])
    tables = Tables(
        genes=[f"G{i:02d}" for i in range(NUM_GENES)],
        relations=["x"],
        edge_index=torch.stack([genes.repeat(2), in_module]),
        edge_type=torch.zeros_like(in_module),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        level=levels[torch.randint(3, (len(perturbed),), generator=generator)],
        y=normal(NUM_GENES, 3)[pairs].prod(dim=1).sum(dim=1),
    )
    make_split = data.node_split if split == "nodes" else data.random_split
    tables.split = make_split(tables, DataConfig(split=split, test_fraction=0.2))
    return tables


@pytest.mark.parametrize("name", BASELINES | LEVELS)
@pytest.mark.parametrize("split", ["random", "nodes"])
def test_a_rival_does_not_use_the_test_scores(name, split):
    rival = (BASELINES | LEVELS)[name]
    tables = make_tables(split)
    before = rival(Problem(tables))
    changed = copy.deepcopy(tables)
    changed.y[changed.rows("test")] = 100 * normal(len(changed.rows("test")), 1)
    assert torch.equal(rival(Problem(changed)), before)
    assert before.shape == tables.y[:, 0].shape
    assert before.isfinite().all()


@pytest.mark.parametrize(
    ("preset", "split", "expected"),
    [
        ("small", "random:0", [0.772, 0.829, 0.934]),
        ("planted", "random:0", [0.671, 0.665, 0.983]),
        ("network", "nodes:0", [0.778, 0.778, 0.980]),
        ("dose", "levels:0", [0.952, 0.951, 0.983]),
    ],
)
def test_the_study_reports_known_figures(preset, split, expected, tmp_path, monkeypatch):
    """Most of these figures are also in tests/bench/README.md."""
    names = ["additive ridge", "graph neighbours"]
    monkeypatch.setattr(quality, "BASELINES", {name: BASELINES[name] for name in names})
    write_defaults(tmp_path)
    arguments = [f"--config={tmp_path / DEFAULTS}", f"--preset={preset}", "--splits", split]
    arguments += [f"--dir={tmp_path}", f"data.cache_dir={tmp_path}/cache", "--models"]
    monkeypatch.setattr("sys.argv", ["quality", *arguments, f"--json={tmp_path}/study.json"])
    quality.main()
    study = json.loads((tmp_path / "study.json").read_text())["tables"]
    rows, _ = study.values()
    found = {row["contestant"]: round(row[split], 3) for row in rows}
    assert [found[name] for name in [*names, "noise ceiling"]] == expected
    *_, ceiling = rows
    assert ceiling["2.5 %"] < ceiling["difference"] < ceiling["97.5 %"]


def test_permuted_names_change_only_the_graph(tmp_path):
    options = DataConfig(cache_dir=str(tmp_path))
    overrides = quality.permute_names(Config(data=options), tmp_path)
    changed = dict(override.removeprefix("data.").split("=") for override in overrides)
    assert Path(changed["perturbations"]) == data.EXAMPLE / "scores.tsv"
    before = data.load(options)
    after = data.load(replace(options, **changed))
    for name in ("genes", "relations"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("perturbed", "perturbed_ptr", "y", "split"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    graphs = (before.graph().edge_index_dict, after.graph().edge_index_dict)
    for old, new in zip(*(graph.values() for graph in graphs), strict=True):
        old_degree, new_degree = (torch.bincount(edges[0], minlength=400) for edges in (old, new))
        assert not torch.equal(old_degree, new_degree)
        assert torch.equal(old_degree.sort().values, new_degree.sort().values)
