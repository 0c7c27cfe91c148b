"""Synthetic tables: the example has the preset `small`, and tables depend on their seed."""

import torch

from data import DataConfig, load, random_split
from tests.bench.synthetic import PRESETS, synthetic_tables


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


def test_synthetic_tables_depend_only_on_their_seed():
    one, same, other = (synthetic_tables(PRESETS["small"], seed) for seed in (0, 0, 1))
    for tables in (one, same, other):
        tables.split = random_split(tables, DataConfig())
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
