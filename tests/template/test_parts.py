"""parts.py: the list of parts, options that need a deleted part, and copies without parts."""

import shutil

import pytest
import torch
import yaml

import ddp_setup
import parts
from config import Config, compose, parse_override
from ddp_setup import DDPConfig, Distributed
from parts import check_parts, optional
from tests.template.fixtures import ROOT, write_table
from tests.template.parts_list import PARTS

BY_NAME = {part.name: part for part in PARTS}
OFF = {part.name: f"{part.option}={part.off}" for part in PARTS if part.option}


def test_the_files_of_the_parts_exist():
    assert len(BY_NAME) == len(PARTS)
    for part in PARTS:
        assert part.loss
        for pattern in part.patterns:
            assert list(ROOT.glob(pattern)), f"{part.name}: {pattern}"


def table_of_parts() -> list[list[str]]:
    """Returns the rows that the table in docs/adapting.md should have, as lists of cells."""
    rows = []
    for part in PARTS:
        files = " ".join(f"`{file}`" for file in part.files)
        option = f"`{part.option}={part.off}`" if part.option else ""
        rows.append([part.name, files, str(part.num_lines()), option, part.loss])
    return rows


def test_the_page_has_the_table_of_parts():
    """The numbers of lines on the page may be up to 10 % wrong."""
    _, _, section = (ROOT / "docs/adapting.md").read_text().partition("## Leaving out\n")
    section, _, _ = section.partition("\n## ")
    _head, _rule, *lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    expected = table_of_parts()
    table = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    advice = f"write these rows into docs/adapting.md:\n{table}"
    assert len(rows) == len(expected), advice
    for row, expected_row in zip(rows, expected, strict=True):
        assert int(row.pop(2)) == pytest.approx(int(expected_row.pop(2)), rel=0.1), advice
        assert row == expected_row, advice


def test_the_off_value_of_an_option_is_valid_and_needs_no_part():
    for name, override in OFF.items():
        key, value = parse_override(override)
        assert compose({key: value}).options()[key] == value
        check_parts({key: value})
        for value_with_part in BY_NAME[name].on:
            compose({key: value_with_part})


def test_a_module_is_only_imported_if_it_exists():
    assert optional("run_plots").curves_svg
    assert optional("run_nothing") is None


def test_an_installed_package_is_not_a_part():
    assert optional("yaml") is None
    assert yaml.safe_load("1") == 1


def test_an_error_inside_a_part_is_raised(tmp_path, monkeypatch):
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
        ("nodes", "model.readout=nodes"),
        ("graphs", "model.cuda_graphs=true"),
        ("reach", "model.message_passing=auto"),
        ("reach", "model.message_passing=reach"),
        ("copies", "model.message_passing=expanded"),
        ("cache", "data.cache_dir=folder"),
        ("transfer", "run.init=first.pt"),
    ],
)
def test_an_option_that_needs_a_deleted_part_is_an_error_of_one_line(
    monkeypatch, train, name, override
):
    part = BY_NAME[name]
    monkeypatch.setattr(parts, "is_here", lambda module: f"{module}.py" != part.files[0])
    refused = train(0, override)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {override} needs {part.files[0]}")
    assert refused.stderr.endswith(f": set {OFF[name]}\n") and refused.stderr.count("\n") == 1
    key, value = parse_override(OFF[name])
    check_parts(Config().options() | {key: value})


@pytest.mark.parametrize(
    ("file", "option", "values"),
    [
        ("model_nodes.py", "model.readout", ["both", "local", "global"]),
        ("model_reach.py", "model.message_passing", ["shared", "expanded"]),
        ("mask_copies.py", "model.message_passing", ["shared", "auto", "reach"]),
    ],
)
def test_other_values_of_an_option_do_not_need_the_part(monkeypatch, file, option, values):
    monkeypatch.setattr(parts, "is_here", lambda module: f"{module}.py" != file)
    for value in values:
        check_parts({option: value})


def test_without_the_part_threads_torch_chooses_the_number_of_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(parts, "is_here", lambda module: module != "ddp_threads")
    number = torch.get_num_threads()
    ddp = Distributed(DDPConfig())
    ddp_setup.setup(ddp)
    assert ddp.threads == f"{number} (chosen by torch)"
    assert torch.get_num_threads() == number


def test_without_the_part_changes_changed_options_are_not_logged(monkeypatch, train, tmp_path):
    """A changed option with the rule "fixed" is still an error."""
    train(0).check()
    monkeypatch.setattr(parts, "is_here", lambda module: module != "run_changes")
    steps = tmp_path / "runs/default/checkpoints"
    for options in (["optim.epochs=2", "optim.lr=0.5"], ["optim.epochs=2", "optim.lr=0.1"]):
        result = train(0, *options).check()
        assert "resumed at step" in result.stdout
        assert "made with" not in result.stdout
        assert torch.load(steps / "step_00000010.pt", weights_only=True)["code"] == {}
    refused = train(0, "run.seed=5")
    assert refused.returncode == 2
    assert "was trained with run.seed=0, not 5" in refused.stderr


# ---- Predictions of a copy -----------------------------------------------------------------------
@pytest.fixture
def predict_without(command, tmp_path):
    """predict_without(names) predicts with runs/run, in a copy without the parts of these names."""
    write_table(tmp_path / "ask.tsv", [("genes",), ("Y01",), ("Y02,Y03",)])

    def start(names):
        copy = tmp_path / "copy"
        copy.mkdir()
        gone = {file for name in names for file in BY_NAME[name].files}
        for path in (*ROOT.glob("*.py"), ROOT / "config.yaml"):
            if path.name not in gone:
                shutil.copy(path, copy)
        return command(0, copy / "predict.py", "ask.tsv", "runs/run")

    return start


@pytest.mark.slow
def test_a_model_predicts_the_same_without_the_parts_that_it_does_not_need(
    trained, predict, predict_without, tmp_path
):
    """The model was trained with all parts."""
    trained("run.name=run")
    needed = {"baseline", "pairs", "predict"}
    predict_without(BY_NAME.keys() - needed).check()
    lines = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    predict(0, "ask.tsv", "runs/run").check()
    expected = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    assert len(lines) == len(expected) == 3
    for line, expected_line in zip(lines[1:], expected[1:], strict=True):
        assert float(line.split("\t")[1]) == pytest.approx(float(expected_line.split("\t")[1]))
