"""parts.py: the list of parts, options of parts that are gone, and training without each part."""

import json
import shutil

import pytest
import torch
import yaml

import ddp_setup
import parts
from config import Config, compose, parse_override
from parts import PARTS, check_parts, optional
from tests.conftest import ROOT, SMALL, copy_template, fork_ranks, join

BY_NAME = {part.name: part for part in PARTS}
# The parts without which a run trains, and what its log must not say then.
WORDS = {
    "baseline": ["baseline"],
    "graphs": ["graphs"],
    "reach": ["reach"],
    "copies": ["copies", "expanded"],
    "predict": ["predict.py", "predictor"],
    "explain": ["explain"],
    "analyse": ["analyse"],
    "notes": ["data_notes"],
    "cache": ["cache"],
    "transfer": ["init ", "transfer"],
    "plots": ["plot", "svg"],
    "threads": ["ddp_threads"],
    "watchdog": ["watchdog"],
    "machines": ["rendezvous"],
    "preflight": ["preflight"],
}
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


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_a_copy_trains_without_a_part(command, tables, tmp_path, name):
    """Its log has no word of what is gone, and the numbers are those of the whole template."""
    part = BY_NAME[name]
    options = [*tables, *SMALL]
    if part.option:
        options.append(OFF[name])
    losses = {}
    for folder in ("whole", "cut"):
        copy = copy_template(tmp_path / folder, tests=False)
        for file in part.files if folder == "cut" else ():
            (copy / file).unlink()
        command(0, copy / "train.py", *options, f"run.name={folder}", start=True).check()
        run = tmp_path / "runs" / folder
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses[folder] = [row["loss"] for row in rows if "loss" in row]
        assert (run / "test.tsv").exists()
        shutil.rmtree(tmp_path / ".cache", ignore_errors=True)
    assert len(losses["cut"]) >= 3
    # With model_reach.py, message_passing=shared leaves it the first layer, whose sums it rounds.
    rounding = 1e-6 if name == "reach" else 0
    assert losses["cut"] == pytest.approx(losses["whole"], rel=rounding, abs=0)
    log = (tmp_path / "runs/cut/log.rank0.txt").read_text()
    assert " INFO test      " in log
    for word in WORDS[name]:
        assert word not in log
    assert (tmp_path / "runs/cut/curves.svg").exists() == (name != "plots")


@pytest.mark.slow
def test_without_the_watchdog_a_hang_ends_by_the_timeout_of_the_group(tables, tmp_path):
    faults = ["without:ddp_watchdog", "hang_in_optimiser:1", "--"]
    timeouts = ["ddp.startup_timeout_s=20", "ddp.timeout_s=1"]
    command = [*faults, "train.py", *tables, *SMALL, *timeouts]
    _store, ranks = fork_ranks(tmp_path, 2, "tests/faulty.py", command)
    ranks[0].join(120)
    ranks[1].kill()
    assert ranks[0].exitcode == 1
    join(ranks)
    error = (tmp_path / "rank0.stderr").read_text()
    assert "error: rank 0: another rank was killed or cannot be reached" in error
    assert "imed out" in error
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed"
    assert "watchdog" not in error + (tmp_path / "runs/default/log.rank0.txt").read_text()
