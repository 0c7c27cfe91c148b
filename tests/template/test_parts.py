"""parts.py: the list of parts, options of parts that are gone, and training without each part."""

import pytest
import torch
import yaml

import ddp_setup
import parts
from config import Config, compose, parse_override
from parts import PARTS, check_parts, optional
from tests.template.fixtures import ROOT

BY_NAME = {part.name: part for part in PARTS}
OFF = {part.name: f"{part.option}={part.off}" for part in PARTS if part.option}


def test_the_files_of_the_parts_are_there():
    assert len(BY_NAME) == len(PARTS)
    for part in PARTS:
        assert part.loss
        for file in part.files:
            assert (ROOT / file).exists(), f"{part.name}: {file}"


def test_the_off_value_of_an_option_is_one_and_asks_for_nothing():
    for name, override in OFF.items():
        key, value = parse_override(override)
        assert compose({key: value}).options()[key] == value
        assert not BY_NAME[name].is_asked_for(BY_NAME[name].off)
        for asking in BY_NAME[name].on:
            compose({key: asking})


def test_a_module_that_is_there_is_imported():
    assert optional("run_plots").curves_svg
    assert optional("run_nothing") is None


def test_a_package_that_is_installed_elsewhere_is_no_part():
    assert optional("yaml") is None
    assert yaml.safe_load("1") == 1


def test_an_error_inside_a_part_is_not_its_absence(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("import run_nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "FOLDER", tmp_path.resolve())
    with pytest.raises(ModuleNotFoundError, match="run_nothing"):
        optional("broken_part")


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("baseline", "model.start=baseline"),
        ("pairs", "model.pairs=true"),
        ("graphs", "model.cuda_graphs=true"),
        ("reach", "model.message_passing=auto"),
        ("reach", "model.message_passing=reach"),
        ("copies", "model.message_passing=expanded"),
        ("cache", "data.cache_dir=folder"),
        ("transfer", "run.init=first.pt"),
    ],
)
def test_an_option_of_a_part_that_is_gone_is_one_sentence(monkeypatch, train, name, override):
    part = BY_NAME[name]
    monkeypatch.setattr(parts, "is_here", lambda module: module != part.modules[0])
    refused = train(0, override)
    assert refused.returncode == 2
    advice = f"{part.files[0]}, which is not here: set {OFF[name]}"
    assert refused.stderr == f"error: {override} needs {advice}\n"
    key, value = parse_override(OFF[name])
    check_parts(Config().options() | {key: value})


def test_without_the_part_threads_torch_chooses_them(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(parts, "is_here", lambda module: module != "ddp_threads")
    number = torch.get_num_threads()
    assert ddp_setup.set_threads(1) == f"{number} (chosen by torch)"
    assert torch.get_num_threads() == number
