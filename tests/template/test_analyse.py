"""analyse.py: errors, JSON output, and the tables for one run, several runs and folds."""

import itertools
import json
import math
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml

import analyse
import analyse_metrics
from analyse_metrics import metrics_by_group
from analyse_results import folds_of, together
from config import load_config
from data import load
from errors import UserError
from losses import LOSSES
from metrics import pearson
from parts import is_here
from run_checkpoint import NEEDED
from tests.template.fixtures import write_table
from tests.template.results import HEADER, make_rows, normal
from tests.tools.runs import read_metrics

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def analyse_here(monkeypatch, tmp_path):
    """analyse_here(*arguments) runs the command in the test's folder, and returns its status."""

    def start(*arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        return analyse.main(list(arguments))

    return start


def write_run(folder: Path, seed: int = 0, state: str = "finished") -> Path:
    """Writes the files of a run that analyse.py reads, except for the tables; returns the folder.

    The run has two scores, of which the second is constant. The seed determines the prediction of
    the first score.
    """
    folder.mkdir(parents=True)
    header = [*HEADER, "flat", "flat_prediction", "flat_baseline"]
    y, noise = normal(40, 1).flatten().tolist(), normal(40, 1, seed=seed + 1).flatten().tolist()
    lines = [(f"G{row}", 0, "", y[row], y[row] + noise[row], 0, 1, 1, 1) for row in range(40)]
    write_table(folder / "test.tsv", [header, *lines])
    missing = {"edges": "none.tsv", "perturbations": "none.tsv"}
    options = {"run": {"seed": seed}, "data": missing}
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    (folder / "metrics.jsonl").write_text('{"kind": "test", "loss": 0.5, "best_step": 3}\n')
    status = {"state": state, "warnings": ["look here"]}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


# ---- Files ---------------------------------------------------------------------------------------
def test_the_error_for_a_run_of_a_different_version_names_the_run(tmp_path, analyse_here, capsys):
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, "", 1, 2, 3)])
    (tmp_path / "config.yaml").write_text("log: {threshold: 1}\n")
    assert analyse_here(str(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path}/config.yaml: unknown option log.threshold: ")
    assert f"version of the template created {tmp_path}, " in printed
    assert printed.count("\n") == 1


def test_the_command_uses_the_threads_of_one_process(analyse_here, monkeypatch):
    taken = []
    monkeypatch.setattr("ddp_threads.choose_threads", lambda count: (3, f"for {count}"))
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert analyse_here("runs/none") == 2
    assert taken == [3, torch.get_num_threads()]  # the second call restores the number


def test_a_missing_file_and_wrong_arguments_are_one_message(tmp_path, analyse_here, capsys):
    assert analyse_here("runs/none") == 2
    expected = "error: cannot read runs/none/test.tsv: No such file or directory: "
    assert capsys.readouterr().err.startswith(expected)
    assert analyse_here() == 2
    assert capsys.readouterr().err.endswith(" required: RUN\n")
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, "", 1, 2, 3)])
    assert analyse_here(".") == 2
    assert capsys.readouterr().err.startswith("error: cannot read the configuration config.yaml: ")


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_a_run_that_has_not_finished_is_one_message(tmp_path, analyse_here, capsys, state):
    write_run(tmp_path / "a", state=state)
    write_run(tmp_path / "b")
    assert analyse_here("a") == 0  # if test.tsv exists, the state does not matter
    (tmp_path / "a/test.tsv").unlink()
    for folders in (["a"], ["b", "a"]):
        capsys.readouterr()
        assert analyse_here(*folders) == 2
        printed, problem = capsys.readouterr()
        assert printed == "" and problem.count("\n") == 1
        reason = f"because the state of the run is {state}"
        assert problem.startswith(f"error: a has no test.tsv, {reason}: ")


def test_a_path_that_is_not_a_run_folder_is_one_message(tmp_path, analyse_here, capsys):
    write_run(tmp_path / "runs/a")
    assert analyse_here("runs/a/test.tsv") == 2
    assert "error: cannot read runs/a/test.tsv/test.tsv: Not a dir" in capsys.readouterr().err
    assert analyse_here("runs") == 2
    assert "error: cannot read runs/test.tsv: No such file" in capsys.readouterr().err


def test_unusual_rows_of_metrics_do_not_cause_a_traceback(tmp_path, analyse_here):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1)
    rows = [{"kind": "test", "loss": 1}, {"kind": "val"}]
    rows += [{"kind": "event", "event": event} for event in ("started", "failed")]
    (tmp_path / "b/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert analyse_here("a", "b") == 0


def test_a_run_folder_that_cannot_be_written_is_one_message(tmp_path, analyse_here, capsys):
    """Here, a folder has the name of the file: root could write into a read-only folder."""
    (write_run(tmp_path / "a") / "test.json").mkdir()
    assert analyse_here("a") == 2
    printed, problem = capsys.readouterr()
    assert printed == "" and problem.count("\n") == 1
    assert problem.startswith("error: cannot write a/test.json: Is a directory: ")
    assert "copy the run folder" in problem
    assert analyse.analyse_run(tmp_path / "a")["n"] == 40


def test_a_run_that_is_listed_twice_is_refused(tmp_path, analyse_here, capsys):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1)
    assert analyse_here("a", "b", "b/../a") == 2
    printed, problem = capsys.readouterr()
    assert printed == "" and problem.startswith("error: b/../a is listed twice: ")


def test_with_a_closed_pipe_files_are_written_and_no_traceback_is_printed(command, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        write_run(tmp_path / name, seed)
    for words in (["a"], ["a", "b", "--json"]):
        result = command(0, "analyse.py", *words, fault="closed_pipe")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert json.loads((tmp_path / "a/test.json").read_text())["n"] == 40
    ElementTree.parse(tmp_path / "a/test.svg")


# ---- For programs --------------------------------------------------------------------------------
def test_the_json_of_a_run_equals_its_file_and_analyse_run(tmp_path, analyse_here, capsys):
    write_run(tmp_path / "a")
    assert analyse_here("a", "--json") == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert printed == (tmp_path / "a/test.json").read_text()
    result = json.loads(printed)
    assert result["targets"]["flat"]["pearson"] is None  # because this score is constant
    assert result["no_rivals"].startswith("cannot read none.tsv: No such file or directory (")
    (tmp_path / "a/test.json").unlink()
    assert without_nan(analyse.analyse_run("a")) == result
    assert math.isnan(analyse.analyse_run("a")["targets"]["flat"]["pearson"])
    assert not (tmp_path / "a/test.json").exists()
    assert capsys.readouterr() == ("", "")


def without_nan(result: dict) -> dict:
    return json.loads(json.dumps(result).replace("NaN", "null"))


def test_the_json_of_several_runs_equals_compare_and_agrees_with_the_text(
    tmp_path, analyse_here, capsys
):
    folders = ["a", "b", "c"]
    for seed, name in enumerate(folders):
        write_run(tmp_path / name, seed)
    files = sorted(tmp_path.rglob("*"))
    assert analyse_here(*folders, "--json") == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    result = json.loads(printed)
    comparison = analyse.compare([Path(name) for name in folders])
    assert without_nan(comparison) == result
    assert capsys.readouterr() == ("", "")
    assert sorted(tmp_path.rglob("*")) == files

    assert result["options"] == {"a": {"run.seed": 0}, "b": {"run.seed": 1}, "c": {"run.seed": 2}}
    assert result["results"]["b"]["best step"] == 3
    assert result["results"]["b"]["val loss"] is None
    assert list(result["figures"]) == folders
    for name in folders:
        assert result["figures"][name]["pearson"] == analyse.analyse_run(name)["pearson"]
    by_pearson = sorted(folders, key=lambda name: -result["figures"][name]["pearson"])
    best_two = result["best_two"]
    assert best_two["runs"] == by_pearson[:2]
    best, second = (result["figures"][name]["pearson"] for name in by_pearson[:2])
    assert best_two["difference"] == pytest.approx(best - second)

    assert analyse_here(*folders) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("best two runs: ")]
    low, high = best_two["gain"]
    assert f" Pearson of {by_pearson[0]} minus {by_pearson[1]} is {best - second:.4f}, " in line
    assert line.endswith(f" {low:.4f} to {high:.4f}")


@pytest.mark.skipif(not is_here("predictor"), reason="without the part predict")
def test_a_note_reports_runs_that_are_the_same(train, tmp_path, analyse_here, capsys):
    for name in ("a", "b"):
        train(0, f"run.name={name}").check()
    folders = [str(tmp_path / "runs/a"), str(tmp_path / "runs/b")]
    best = tmp_path / "runs/b/checkpoints/best.pt"
    (note,) = analyse.compare(folders)["notes"]
    assert note.startswith(f"{best} has the same parameters as ")
    assert analyse_here(*folders) == 0
    assert f"note      {note}\n" in capsys.readouterr().out
    best.unlink()
    (note,) = analyse.compare(folders)["notes"]
    assert note.startswith(f"{best} is not a readable checkpoint")


def test_options_that_only_a_later_config_contains_are_shown(tmp_path):
    write_run(tmp_path / "a")
    folder = write_run(tmp_path / "b")
    with (folder / "config.yaml").open("a") as file:
        file.write("optim: {lr: 0.5}\n")
    options = analyse.compare([tmp_path / "a", folder])["options"]
    assert options == {str(tmp_path / "a"): {"optim.lr": 0.01}, str(folder): {"optim.lr": 0.5}}


def test_code_files_that_differ_are_shown_with_the_options(tmp_path, analyse_here, capsys):
    """Code files that only one run uses are not shown: they depend on its options."""
    codes = {
        "a": {"losses.py": "111", "model.py": "5", "model_reach.py": "7"},
        "b": {"losses.py": "222", "model.py": "5"},
        "c": None,  # best.pt is missing
    }
    for name, code in codes.items():
        folder = write_run(tmp_path / name)
        if code is not None:
            (folder / "checkpoints").mkdir()
            best = dict.fromkeys(NEEDED) | {"model": {}, "code": code}
            torch.save(best, folder / "checkpoints/best.pt")
    folders = [tmp_path / name for name in codes]
    options = analyse.compare(folders)["options"]
    shown = [{"losses.py": "111"}, {"losses.py": "222"}, {"losses.py": None}]
    assert list(options.values()) == shown
    assert analyse_here("a", "b", "c") == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:5]]
    assert header[0] == "losses.py"
    assert [row[1] for row in rows] == ["111", "222", "None"]


def test_compare_needs_a_list_of_runs(tmp_path):
    folder = write_run(tmp_path / "a")
    for runs in ("runs", folder, [folder], []):
        with pytest.raises(UserError, match="compare needs a list of at least two runs"):
            analyse.compare(runs)
    with pytest.raises(UserError, match="is listed twice"):
        analyse.compare([folder, str(folder)])


def test_runs_are_sorted_by_the_validation_value_of_the_first_metric(
    tmp_path, analyse_here, capsys
):
    values = {"a": 0.1, "b": -0.5, "c": None, "d": 0.7, "e": math.nan}
    for name, pearson_of_val in values.items():
        write_run(tmp_path / name)
        val = {"kind": "val", "step": 3, "pearson": pearson_of_val}
        test = {"kind": "test", "best_step": 3, "loss": 0.5, "pearson": 0.1}
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, (val, test))))
    assert analyse_here(*values) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[2:7]] == ["d", "a", "e", "b", "c"]
    assert list(analyse.compare(list(values))["results"]) == ["d", "a", "e", "b", "c"]


# ---- One run -------------------------------------------------------------------------------------
def test_groups_of_rows_are_printed_and_written(train, tables, tmp_path, analyse_here, capsys):
    options = ["data.split=nodes", "data.test_fraction=0.2"]
    train(0, *options).check()
    assert analyse_here("runs/default") == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(Path("runs/default/test.json").read_text())
    assert result["by_unseen"].keys() >= {"1", "2"}
    assert result["by_deletions"].keys() == {"1", "2", "3"}
    assert sum(group["n"] for group in result["by_unseen"].values()) == result["n"]
    first = result["by_unseen"]["1"]
    assert first["baseline_pearson"] != result["baseline_pearson"]
    (line,) = [line for line in lines if line.startswith("1 unseen gene ")]
    low, high = first["gain"]
    cells = [f"{first['n']:,}", f"{first['pearson']:.4f}", f"{first['baseline_pearson']:.4f}"]
    assert re.split(r"  +", line)[1:5] == [*cells, f"{low:.4f} to {high:.4f}"]
    ElementTree.parse("runs/default/test.svg")


@pytest.mark.slow
def test_a_copy_of_the_run_folder_suffices_except_for_rivals(train, tmp_path, analyse_here, capsys):
    train(0, "data.split=nodes", "data.test_fraction=0.2").check()
    assert analyse_here("runs/default") == 0
    result = json.loads(Path("runs/default/test.json").read_text())
    config = yaml.safe_load(Path("runs/default/config.yaml").read_text())

    def analyse_copy() -> str:
        Path("config.yaml").write_text(yaml.safe_dump(config))
        capsys.readouterr()
        assert analyse_here(".") == 0
        return capsys.readouterr().out

    for name in ("test.tsv", "checkpoints"):
        shutil.move(f"runs/default/{name}", name)
    analyse_copy()
    assert json.loads(Path("test.json").read_text()) == result
    config["data"]["split_seed"] = 1
    problem = "no comparison with predictions that do not use the model"
    assert f"{problem}: the tables have changed since the run" in analyse_copy()
    config["data"]["edges"] = "none.tsv"
    where = f"(paths are relative to the working directory, {tmp_path})"
    missing = f"cannot read none.tsv: No such file or directory {where}"
    assert f"{problem}: {missing}" in analyse_copy()
    del result["rivals"]
    result["no_rivals"] = missing
    assert json.loads(Path("test.json").read_text()) == result


def test_a_table_with_sd_has_noise_ceilings(train, tmp_path, analyse_here, capsys):
    header, *lines = (tmp_path / "scores.tsv").read_text().splitlines()
    rows = [f"{line}\t{0.1 + 0.1 * (i % 5):.1f}" for i, line in enumerate(lines)]
    (tmp_path / "noisy.tsv").write_text("\n".join([f"{header}\tsd", *rows]) + "\n")
    log = train(0, "data.perturbations=noisy.tsv").check().stdout
    assert "; rows are weighted " in log
    assert analyse_here("runs/default") == 0
    printed = capsys.readouterr().out
    for text in (
        "1 score; rows are weighted\n",
        "  Pearson noise ceiling  ",
        "R2 noise ceiling  R2 / ceiling",
    ):
        assert text in printed
    result = json.loads(Path("runs/default/test.json").read_text())
    share = result["r2"] / result["ceiling_r2"]
    assert share == pytest.approx(result["r2_of_ceiling"])
    assert f"  {share:.4f}  " in printed


def test_runs_with_different_losses_are_compared_by_their_scores(tmp_path, monkeypatch, capsys):
    """Further predictions of one of the losses are not compared.

    Runs with binary scores cannot be compared with runs with other scores.
    """
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1)
    monkeypatch.chdir(tmp_path)
    expected = analyse.compare(["a", "b"])
    lines = [line.split("\t") for line in (tmp_path / "b/test.tsv").read_text().splitlines()]
    for number, cells in enumerate(lines):
        cells[8:8] = ["1" if number else "flat_prediction_sd"]
        cells[5:5] = ["1" if number else "score_prediction_sd"]
    write_table(tmp_path / "b/test.tsv", lines)
    with (tmp_path / "b/config.yaml").open("a") as file:
        file.write("optim: {loss: binary}\n")
    assert analyse.main(["a", "b"]) == 2
    printed, problem = capsys.readouterr()
    assert printed == "" and problem.count("\n") == 1
    assert problem.startswith("error: a has optim.loss=squared, b has optim.loss=binary: ")
    monkeypatch.setattr(LOSSES["binary"], "is_binary", False)
    compared = analyse.compare(["a", "b"])
    assert compared["figures"] == expected["figures"]
    assert compared["ensemble"] == expected["ensemble"]


@pytest.mark.parametrize(
    ("low", "high", "place"),
    [
        (1.2e-9, 3.2e-8, "not clearly higher"),
        (-3e-8, -1e-9, "not clearly higher"),
        (0.001, 0.2, "higher"),
    ],
)
def test_a_model_is_better_than_a_rival_only_by_more_than_the_rounding_of_files(low, high, place):
    rival = {"pearson": 0.9, "gain": [low, high]}
    *_, sentence = analyse.table_of_rivals({"baseline": rival})
    assert sentence.startswith("strongest rival: baseline; ")
    assert sentence.endswith(f"Pearson is {place}")


def test_weights_of_rows_decide_about_rivals_and_the_best_two_runs():
    """They decide the order of rivals, the difference from each, and the best two runs."""
    rows = make_rows(200)
    rows.y = normal(200, 1, seed=4)
    good = rows.y + 0.1 * normal(200, 1, seed=5)
    noise = normal(200, 1, seed=6)
    is_noisy = (torch.arange(200) % 3 == 0).unsqueeze(1)
    exact_where_it_counts = good.where(~is_noisy, 5 * noise)
    fair = rows.y + noise
    weight = torch.where(is_noisy[:, 0], 1e-6, 1.0).double()
    rows = replace(rows, weight=weight, predictions={"prediction": exact_where_it_counts})
    rows.rivals = {"baseline": fair}
    rivals = {"fair": fair, "exact": exact_where_it_counts}
    of_rivals = analyse_metrics.metrics_of_rivals(rows, rivals, "squared")
    assert list(of_rivals) == ["exact", "baseline: fair"]
    assert pearson(rows.y, exact_where_it_counts) < pearson(rows.y, fair)
    low, _ = of_rivals["baseline: fair"]["gain"]
    assert low > 0
    members = {"a": replace(rows, predictions={"prediction": fair}), "b": rows}
    best_two = analyse_metrics.difference_of_best(members, "squared")
    assert best_two["runs"] == ["b", "a"]
    assert 0 < best_two["gain"][0] < best_two["difference"] < best_two["gain"][1]


def test_rivals_are_not_fitted_to_tables_that_have_changed(trained, tmp_path, analyse_here, capsys):
    """They are not fitted either if the test rows of the changed tables are the same."""
    trained("optim.lr=0.0")
    assert analyse_here("runs/default") == 0
    printed = capsys.readouterr().out
    assert "not clearly higher" in printed
    test = Path("runs/default/test.tsv")
    header, *of_rows = test.read_text().splitlines(keepends=True)
    for others in (of_rows[::-1], of_rows[1:]):  # rivals need the same rows in the same order
        test.write_text(header + "".join(others))
        assert analyse_here("runs/default") == 0
        assert "the rows of test.tsv are not the test rows" in capsys.readouterr().out
    own = load(load_config(["runs/default/config.yaml"]).data)
    row = own.rows("train")[0].item()
    path = Path("scores.tsv")
    lines = path.read_text().splitlines()
    lines[row + 1] = lines[row + 1].split("\t")[0] + "\t77"
    path.write_text("\n".join(lines) + "\n")
    assert analyse_here("runs/default") == 0
    assert "the tables have changed since the run" in capsys.readouterr().out


def test_without_a_rival_in_the_file_other_rivals_are_still_compared(trained, analyse_here, capsys):
    trained("model.start=mean")
    assert analyse_here("runs/default") == 0
    printed = capsys.readouterr().out
    assert "\ntest.tsv has no predictions of a rival, " in printed
    assert "\nstrongest rival: " in printed
    assert "baseline" not in printed


def test_a_line_reports_that_the_part_that_fits_rivals_is_missing(
    trained, analyse_here, monkeypatch, capsys
):
    trained("model.start=mean")
    monkeypatch.setattr("analyse.is_here", lambda module: module != "analyse_rivals")
    assert analyse_here("runs/default") == 0
    *_, reason, _ = capsys.readouterr().out.splitlines()
    assert reason.startswith("no comparison ") and reason.endswith(" not compute them")
    found = analyse.analyse_run("runs/default")
    assert "gain" not in found
    assert found["by_unseen"]["0"]["pearson"] is not None


def test_of_many_scores_only_the_first_are_printed():
    rows = make_rows(50, analyse.SHOWN + 3)
    lines = analyse.table(metrics_by_group(rows), rows.rivals)
    assert sum(line.startswith("t") for line in lines) == analyse.SHOWN
    *lines, more = lines
    assert "3 more scores" in more
    assert len({len(line) for line in lines}) == 1


def test_home_and_variables_in_run_folders_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RUNS", "/scratch/runs")
    parsed = analyse.read_arguments(["~/runs/a", "$RUNS/b", "runs/c"])
    assert list(map(str, parsed.runs)) == ["/home/me/runs/a", "/scratch/runs/b", "runs/c"]


def test_undefined_metrics_are_null_in_json_and_a_dash_in_tables(tmp_path, analyse_here, capsys):
    rows = [("a", 0, "", "", 2, 3), ("b", 1, "b", "", 1, 3)]
    write_table(tmp_path / "test.tsv", [HEADER, *rows])
    (tmp_path / "config.yaml").touch()
    assert analyse_here(".") == 0
    result = json.loads((tmp_path / "test.json").read_text())
    assert (result["n"], result["rows"]) == (0, 2)
    assert result["pearson"] is result["mse"] is None
    assert result["gain"] == [None, None]
    assert re.split(r"  +", capsys.readouterr().out.splitlines()[2])[1:6] == ["0", "2", *"---"]
    ElementTree.parse(tmp_path / "test.svg")


def test_rows_with_a_score_and_all_rows_are_counted(tmp_path, analyse_here, capsys):
    """The second column of counts is empty for a group in which all rows have a score."""
    rows = []
    for row in range(9):
        genes = f"A{row},B" if row < 5 else f"A{row}"
        rows.append((genes, 0, "", "NA" if row in (0, 3) else row, row, row * (-1) ** row))
    table = [HEADER, *(["" if cell == "NA" else cell for cell in row] for row in rows)]
    write_table(tmp_path / "test.tsv", table)
    (tmp_path / "config.yaml").touch()
    assert analyse_here(".") == 0
    result = json.loads((tmp_path / "test.json").read_text())
    assert (result["n"], result["rows"]) == (7, 9)
    groups = result["by_deletions"]
    assert (groups["2"]["n"], groups["2"]["rows"]) == (3, 5)
    assert groups["1"]["n"] == 4
    assert "rows" not in groups["1"]
    first, header, *lines = capsys.readouterr().out.splitlines()
    assert first == "test.tsv: 9 test rows, 1 score"
    assert re.split(r"  +", header)[1:4] == ["rows", "incl. unscored rows", "Pearson"]
    counts = [re.split(r"  +", line)[:3] for line in lines[:3]]
    one, two = "1 perturbed gene", "2 perturbed genes"
    assert counts == [["all rows", "7", "9"], [one, "4", "1.0000"], [two, "3", "5"]]


def test_each_of_several_scores_has_its_own_number_of_rows():
    rows = make_rows(30, 2)
    rows.y[:5, 1] = math.nan
    counts = (~rows.y.isnan()).sum(dim=0).tolist()
    assert counts[0] != counts[1]
    targets = metrics_by_group(rows)["targets"]
    assert [target["n"] for target in targets.values()] == counts


# ---- Several runs --------------------------------------------------------------------------------
def test_each_run_and_the_ensemble_are_compared(train, tmp_path, analyse_here, capsys):
    options = {
        "a": ["run.seed=1"],
        "b": ["run.seed=2"],
        "c": ["model.layers=1", "model.readout=local"],
    }
    for name, arguments in options.items():
        train(0, *arguments, "optim.lr=0.05", f"run.name={name}").check()
    capsys.readouterr()
    assert analyse_here("runs/a", "runs/b", "runs/c") == 0
    lines = capsys.readouterr().out.splitlines()

    # The first table compares the options and the best steps of the runs.
    header, *rows = [re.split(r"  +", line.strip()) for line in lines[1:5]]
    assert header == [
        "run.seed", "model.layers", "model.readout", "best step", "val loss", "test loss",
        "val pearson", "test pearson",
    ]  # fmt: skip
    of_run = {row[0]: row for row in rows}
    for name, chosen in zip("abc", (["1", "2"], ["2", "2"], ["0", "1"]), strict=True):
        run, seed, layers, readout, step, *figures = of_run[f"runs/{name}"]
        (test,) = read_metrics(tmp_path / "runs" / name, "test")
        val_rows = read_metrics(tmp_path / "runs" / name, "val")
        (val,) = [row for row in val_rows if row["step"] == test["best_step"]]
        assert (run, seed, layers) == (f"runs/{name}", *chosen)
        assert (readout == "local") is (name == "c")
        assert int(step) == test["best_step"]
        expected = [row[key] for key in ("loss", "pearson") for row in (val, test)]
        assert [float(figure) for figure in figures] == pytest.approx(expected, abs=1e-4)
    in_val = [float(row[-2]) for row in rows]
    assert in_val == sorted(in_val, reverse=True)
    assert lines[5] == ""

    # The second table compares their predictions.
    assert lines[6].startswith("3 runs: ")
    figures = {line.split("  ")[0].strip(): line for line in lines[8:14]}
    together = ["mean", "standard deviation", "ensemble"]
    assert list(figures) == ["runs/a", "runs/b", "runs/c", *together]
    pearson = [float(re.search(r"-?0\.\d+", line)[0]) for line in list(figures.values())[:5]]
    assert pearson[3] == pytest.approx(statistics.mean(pearson[:3]), abs=2e-4)
    assert pearson[4] == pytest.approx(statistics.stdev(pearson[:3]), abs=2e-4)
    assert " to " in figures["ensemble"]
    assert " to " not in figures["runs/a"]
    assert lines[14].startswith("best two runs: ")

    train(0, "data.split_seed=1", "run.name=other").check()
    assert analyse_here("runs/a", "runs/other") == 2
    assert "error: runs/a, runs/other share some test rows " in capsys.readouterr().err


# ---- Folds ---------------------------------------------------------------------------------------
def columns_of(*files: Path) -> np.ndarray:
    """Returns weight, score, prediction and baseline of all rows of test.tsv files, [rows, 4]."""
    lines = [line for file in files for line in file.read_text().splitlines()[1:]]
    return np.array([line.split("\t")[3:] for line in lines], dtype=float)


def weighted_pearson(y: np.ndarray, prediction: np.ndarray, weight: np.ndarray) -> float:
    covariance = np.cov(y, prediction, aweights=weight)
    return covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1])


def test_folds_are_a_cross_validation_of_ensembles(
    train, tmp_path, analyse_here, monkeypatch, capsys
):
    """There are two folds with two seeds each, in a split by nodes.

    Rows with two nodes may be tested in both folds.
    """
    header, *lines = (tmp_path / "scores.tsv").read_text().splitlines()
    rows = [f"{line}\t{0.1 + i % 5}" for i, line in enumerate(lines)]
    (tmp_path / "weighted.tsv").write_text("\n".join([f"{header}\tweight", *rows]) + "\n")
    runs = []
    for k, seed in itertools.product(range(2), range(2)):
        runs.append(f"runs/f{k}s{seed}")
        options = [f"data.fold={k}/3", f"run.seed={seed}", f"run.name=f{k}s{seed}"]
        options += ["data.perturbations=weighted.tsv", "data.split=nodes", "optim.lr=0.05"]
        train(0, *options).check()
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    found = analyse.compare(runs)
    assert found["folds"] == {runs[0]: runs[:2], runs[2]: runs[2:]}

    folds = []
    for pair in found["folds"].values():
        one, two = (columns_of(Path(run, "test.tsv")) for run in pair)
        assert (one[:, :2] == two[:, :2]).all() and (one[:, 2] != two[:, 2]).any()
        one[:, 2] = (one[:, 2] + two[:, 2]) / 2
        folds.append(one)
    weight, y, prediction, baseline = np.concatenate(folds).T
    all_folds = found["all_folds"]
    assert all_folds["n"] == len(y)
    assert all_folds["pearson"] == pytest.approx(weighted_pearson(y, prediction, weight))
    assert all_folds["mse"] == pytest.approx(np.average((y - prediction) ** 2, weights=weight))
    of_baseline = pytest.approx(weighted_pearson(y, baseline, weight))
    assert all_folds["baseline_pearson"] == of_baseline
    (of_rival,) = [rival for name, rival in all_folds["rivals"].items() if "baseline" in name]
    assert of_rival["pearson"] == of_baseline  # although the rival is fitted again

    each = [weighted_pearson(fold[:, 1], fold[:, 2], fold[:, 0]) for fold in folds]
    in_figures = [figures["pearson"] for figures in found["figures"].values()]
    assert in_figures == pytest.approx(each)
    assert found["mean"]["pearson"] == pytest.approx(np.mean(each))
    assert found["sd"]["pearson"] == pytest.approx(np.std(each, ddof=1))

    alone = analyse.compare([runs[0], runs[2]])
    for run in (runs[0], runs[2]):
        of_run = analyse.analyse_run(run)
        assert alone["figures"][run].items() <= of_run.items()

    assert analyse_here(*runs, "--json") == 0
    assert json.loads(capsys.readouterr().out) == without_nan(found)
    assert analyse_here(*runs) == 0
    printed = capsys.readouterr().out
    assert "\n4 runs of 2 folds, " in printed and f" {len(y)} test rows, 1 score; " in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("all rows  ")]
    printed_metrics = [all_folds["pearson"], all_folds["baseline_pearson"]]
    assert [float(cell) for cell in line.split()[3:5]] == pytest.approx(printed_metrics, abs=1e-4)


def test_runs_that_share_only_some_rows_are_not_folds():
    rows = replace(make_rows(24), unseen_genes=[""] * 24)
    first, second = (rows.select(torch.arange(24).unsqueeze(1) % 2 == k) for k in range(2))
    members = {"a": first, "b": second, "c": first, "d": second}
    assert folds_of(members) == {"a": ["a", "c"], "b": ["b", "d"]}
    weighted = replace(rows, weight=torch.ones(24, dtype=torch.float64))
    noisy = replace(rows, sd=torch.ones(24, dtype=torch.float64))
    assert folds_of({"a": noisy, "b": noisy}) == {"a": ["a", "b"]}
    of_others = [replace(second, rivals={}), replace(second, targets=["other"])]
    for others in (rows, weighted, noisy, *of_others):
        for runs in ({"a": first, "b": others}, {"a": others, "b": first}):
            with pytest.raises(UserError, match=r"^a, b share some test rows "):
                folds_of(runs)


def test_a_row_that_two_folds_test_has_the_unseen_nodes_of_both_folds():
    rows = replace(make_rows(1), genes=["A,B"], y=torch.ones(1, 1).double())
    members = {name: replace(rows, unseen_genes=[name]) for name in "AB"}
    assert folds_of(members) == {"A": ["A"], "B": ["B"]}
    assert together(list(members.values())).unseen_genes == ["A,B", "A,B"]


def test_a_truncated_line_of_metrics_is_ignored_and_a_missing_file_is_an_error(
    train, tmp_path, analyse_here, capsys
):
    train(0, "run.name=a").check()
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/b")
    with (tmp_path / "runs/b/metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    assert analyse_here("runs/a", "runs/b") == 0
    of_a, of_b = capsys.readouterr().out.splitlines()[2:4]
    assert of_a.removeprefix("runs/a") == of_b.removeprefix("runs/b")
    (tmp_path / "runs/b/metrics.jsonl").unlink()
    assert analyse_here("runs/a", "runs/b") == 2
    assert "error: cannot read runs/b/metrics.jsonl: " in capsys.readouterr().err
