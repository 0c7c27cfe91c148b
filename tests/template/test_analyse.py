"""analyse.py: errors, JSON output, and the tables for one run, several runs and folds."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import analyse
from analyse_metrics import metrics_by_group, metrics_of_rivals
from analyse_results import folds_of, together
from errors import UserError
from losses import LOSSES
from metrics import pearson
from parts import is_here
from run_checkpoint import NEEDED
from tests.template.fixtures import write_table
from tests.template.results import HEADER, make_rows, normal
from tests.tools.runs import read_metrics

pytestmark = pytest.mark.usefixtures("few_resamples")


STATE = '{"state": "%s"}'  # the text of a status.json


@pytest.fixture
def analyse_here(monkeypatch, tmp_path):
    """analyse_here(*arguments) runs the command in the test's folder, and returns its status."""

    def start(*arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        return analyse.main(list(arguments))

    return start


def write_run(folder: Path, seed: int = 0) -> Path:
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
    (folder / "status.json").write_text(STATE % "finished")
    return folder


# ---- Files ---------------------------------------------------------------------------------------
# For each error: files and their texts, None for a missing file; arguments; the message.
ERRORS = [
    ({}, "", ".* required: RUN$"),
    ({}, "none", "none has no test.tsv: correct the path, wait "),
    ({}, "a/test.tsv", "a/test.tsv has no test.tsv: "),
    ({"a/test.tsv": None}, "b a", "a has no test.tsv: "),
    ({}, "a b b/../a", "b/../a is listed twice: "),
    ({"a/config.yaml": None}, "a", "cannot read the configuration a/config.yaml: "),
    (
        {"a/config.yaml": "log: {threshold: 1}\n"},
        "a",
        "a/config.yaml: unknown option log.threshold: .*version of the template created a, ",
    ),
    ({"b/metrics.jsonl": None}, "a b", "cannot read b/metrics.jsonl: "),
    # Here, a folder has the name of the file: root could write into a read-only folder.
    ({"a/test.json/x": ""}, "a", "cannot write a/test.json: Is a directory: .*copy the run"),
]


@pytest.mark.parametrize(("files", "arguments", "message"), ERRORS)
def test_an_error_is_one_message(files, arguments, message, tmp_path, analyse_here, capsys):
    for seed, name in enumerate("ab"):
        write_run(tmp_path / name, seed)
    for file, text in files.items():
        if text is None:
            (tmp_path / file).unlink()
        else:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
    assert analyse_here(*arguments.split()) == 2
    printed, problem = capsys.readouterr()
    assert printed == "" and problem.count("\n") == 1
    assert re.match(f"error: {message}", problem)


def test_the_command_uses_the_threads_of_one_process(analyse_here, monkeypatch):
    taken = []
    monkeypatch.setattr("ddp_threads.choose_threads", lambda count: (3, f"for {count}"))
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert analyse_here("runs/none") == 2
    assert taken == [3, torch.get_num_threads()]  # the second call restores the number


def test_unusual_rows_of_metrics_and_the_state_of_a_run_with_test_rows_are_ignored(
    tmp_path, analyse_here, capsys
):
    for name in "abc":
        write_run(tmp_path / name)
    (tmp_path / "b/status.json").write_text(STATE % "running")
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write('{"kind": "val"}\n{"kind": "event", "event": "failed"}\n{"kind": "tr')
    (tmp_path / "c/metrics.jsonl").write_text('{"kind": "test", "loss": 1}\n{"kind": "val"}\n')
    assert analyse_here("a", "b", "c") == 0
    of_a, of_b = capsys.readouterr().out.splitlines()[2:4]
    assert of_a.removeprefix("a") == of_b.removeprefix("b")


def test_with_a_closed_pipe_files_are_written_and_no_traceback_is_printed(command, tmp_path):
    write_run(tmp_path / "a")
    result = command(0, "analyse.py", "a", fault="closed_pipe")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert json.loads((tmp_path / "a/test.json").read_text())["n"] == 40


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


def test_the_json_of_several_runs_equals_compare(tmp_path, analyse_here, capsys):
    folders = ["a", "b", "c"]
    for seed, name in enumerate(folders):
        write_run(tmp_path / name, seed)
    files = sorted(tmp_path.rglob("*"))
    assert analyse_here(*folders, "--json") == 0
    printed, errors = capsys.readouterr()
    result = json.loads(printed)
    assert without_nan(analyse.compare([Path(name) for name in folders])) == result
    assert capsys.readouterr() == ("", "") and errors == ""
    assert sorted(tmp_path.rglob("*")) == files
    assert result["options"] == {"a": {"run.seed": 0}, "b": {"run.seed": 1}, "c": {"run.seed": 2}}
    assert result["results"]["b"]["best step"] == 3
    assert result["results"]["b"]["val loss"] is None
    for name in folders:
        assert result["figures"][name]["pearson"] == analyse.analyse_run(name)["pearson"]


@pytest.mark.skipif(not is_here("predictor"), reason="without the part predict")
def test_a_note_reports_runs_that_are_the_same(members, tmp_path, analyse_here, capsys):
    folders = [members[0], "runs/same"]
    shutil.copytree(tmp_path / members[0], tmp_path / "runs/same")
    assert analyse_here(*folders) == 0
    (note,) = analyse.compare(folders)["notes"]
    assert note.startswith("runs/same/checkpoints/best.pt has the same parameters as ")
    assert f"note      {note}\n" in capsys.readouterr().out
    Path("runs/same/checkpoints/best.pt").unlink()
    (note,) = analyse.compare(folders)["notes"]
    assert note.startswith("runs/same/checkpoints/best.pt is not a readable checkpoint")


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
BY_NODES = ("data.split=nodes", "data.test_fraction=0.2")


def test_groups_of_rows_are_printed_and_written(trained, analyse_here, capsys):
    trained(*BY_NODES)
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
    (line,) = [line for line in lines if " 100 bootstrap samples " in line]
    drawn = [result["sets_drawn"], result["genes_drawn"]]
    assert list(map(int, re.findall(r"(\d+) [su]", line))) == drawn


@pytest.mark.slow
def test_a_copy_of_the_run_folder_suffices_except_for_rivals(
    trained, tmp_path, analyse_here, capsys
):
    trained(*BY_NODES)
    assert analyse_here("runs/default") == 0
    result = json.loads(Path("runs/default/test.json").read_text())
    for name in ("test.tsv", "checkpoints", "config.yaml"):
        shutil.move(f"runs/default/{name}", name)
    assert analyse_here(".") == 0
    assert json.loads(Path("test.json").read_text()) == result
    Path("edges.tsv").unlink()
    capsys.readouterr()
    assert analyse_here(".") == 0
    place = f"(paths are relative to the working directory, {tmp_path})"
    missing = f"cannot read edges.tsv: No such file or directory {place}"
    printed = capsys.readouterr().out
    assert f"no comparison with predictions that do not use the model: {missing}\n" in printed
    del result["rivals"]
    assert json.loads(Path("test.json").read_text()) == {**result, "no_rivals": missing}


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
        (-0.2, -0.001, "lower"),
    ],
)
def test_a_model_differs_from_a_rival_only_by_more_than_the_rounding_of_files(low, high, place):
    rival = {"pearson": 0.9, "gain": [low, high]}
    *_, sentence = analyse.table_of_rivals({"baseline": rival})
    assert sentence.startswith("strongest rival: baseline; ")
    assert sentence.endswith(f"Pearson is {place}")


def test_weights_of_rows_decide_about_rivals():
    """They decide the order of rivals, and the difference from each."""
    y, noise = normal(200, 1, seed=4), normal(200, 1, seed=6)
    fair = y + noise
    weight = torch.where(torch.arange(200) % 3 == 0, 1e-6, 1.0).double()
    exact = (y + 0.1 * normal(200, 1, seed=5)).where(weight.unsqueeze(1) == 1, 5 * noise)
    assert pearson(y, exact) < pearson(y, fair)
    rows = replace(make_rows(200), y=y, weight=weight, rivals={"baseline": fair})
    rows.predictions = {"prediction": exact}
    of_rivals = metrics_of_rivals(rows, {"fair": fair, "exact": exact}, "squared")
    assert list(of_rivals) == ["exact", "baseline: fair"]
    assert of_rivals["baseline: fair"]["gain"][0] > 0


def test_rivals_are_not_fitted_to_tables_that_have_changed(trained, analyse_here, capsys):
    """They are not fitted either if the test rows of the changed tables are the same."""
    trained("optim.lr=0.0")
    assert analyse_here("runs/default") == 0
    assert "not clearly higher" in capsys.readouterr().out
    for file, kept, reason in (
        ("runs/default/test.tsv", slice(None, None, -1), "rows of test.tsv are not the test rows"),
        ("edges.tsv", slice(1, None), "the tables have changed since the run"),
    ):
        header, *lines = Path(file).read_text().splitlines(keepends=True)
        Path(file).write_text("".join([header, *lines[kept]]))
        assert analyse_here("runs/default") == 0
        assert reason in capsys.readouterr().out


def test_rivals_are_missing_in_the_file_or_cannot_be_fitted(
    trained, analyse_here, monkeypatch, capsys
):
    trained("model.start=mean")
    assert analyse_here("runs/default") == 0
    printed = capsys.readouterr().out
    assert "\ntest.tsv has no predictions of a rival " in printed
    assert "\nstrongest rival: " in printed
    assert "baseline" not in printed
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


def test_rows_with_a_score_and_all_rows_are_counted(tmp_path, analyse_here, capsys):
    """The second column of counts is empty for a group in which all rows have a score."""
    rows = [HEADER]
    for row in range(9):
        score = "" if row in (0, 3) else row
        rows.append((f"A{row},B" if row < 5 else f"A{row}", 0, "", score, row, row * (-1) ** row))
    write_table(tmp_path / "test.tsv", rows)
    (tmp_path / "config.yaml").touch()
    assert analyse_here(".") == 0
    first, header, *lines = capsys.readouterr().out.splitlines()
    assert first == "test.tsv: 9 test rows, 1 score"
    assert re.split(r"  +", header)[1:4] == ["rows", "incl. unscored rows", "Pearson"]
    counts = [re.split(r"  +", line)[:3] for line in lines[:3]]
    one, two = "1 perturbed gene", "2 perturbed genes"
    assert counts == [["all rows", "7", "9"], [one, "4", "1.0000"], [two, "3", "5"]]


# ---- Several runs --------------------------------------------------------------------------------
def test_each_run_and_the_ensemble_are_compared(members, tmp_path, analyse_here, capsys):
    assert analyse_here(*members) == 0
    lines = capsys.readouterr().out.splitlines()
    found = analyse.compare(members)

    # The first table compares the options and the best steps of the runs.
    header, *rows = [re.split(r"  +", line.strip()) for line in lines[1:5]]
    assert header == [
        "run.seed", "model.layers", "model.readout", "best step", "val loss", "test loss",
        "val pearson", "test pearson",
    ]  # fmt: skip
    options = {"runs/a": [1, 2, "both"], "runs/b": [2, 2, "both"], "runs/c": [0, 1, "local"]}
    for run, *cells in rows:
        (test,) = read_metrics(tmp_path / run, "test")
        val_rows = read_metrics(tmp_path / run, "val")
        (val,) = [row for row in val_rows if row["step"] == test["best_step"]]
        figures = [row[key] for key in ("loss", "pearson") for row in (val, test)]
        assert cells[:4] == list(map(str, [*options.pop(run), test["best_step"]]))
        assert [float(cell) for cell in cells[4:]] == pytest.approx(figures, abs=1e-4)
    in_val = [float(row[-2]) for row in rows]
    assert in_val == sorted(in_val, reverse=True)
    assert options == {} and lines[5] == ""

    # The second table compares their predictions.
    assert lines[6].startswith("3 runs: ")
    figures = found["figures"] | {"mean": found["mean"], "standard deviation": found["sd"]}
    figures["ensemble"] = found["ensemble"]
    for (name, metrics), line in zip(figures.items(), lines[8:14], strict=True):
        assert line.startswith(name) and f"  {metrics['pearson']:.4f}  " in line
        assert (" to " in line) is (name == "ensemble")
    for name in ("mean", "baseline: sum of effects", "pair features by ridge"):
        assert any(line.startswith(f"{name}  ") for line in lines[14:])


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
    of_baseline = pytest.approx(weighted_pearson(y, baseline, weight))
    assert all_folds["baseline_pearson"] == of_baseline
    (of_rival,) = [rival for name, rival in all_folds["rivals"].items() if "baseline" in name]
    assert of_rival["pearson"] == of_baseline  # although the rival is fitted again
    each = [weighted_pearson(fold[:, 1], fold[:, 2], fold[:, 0]) for fold in folds]
    in_figures = [figures["pearson"] for figures in found["figures"].values()]
    assert in_figures == pytest.approx(each)

    assert analyse_here(*runs, "--json") == 0
    assert json.loads(capsys.readouterr().out) == without_nan(found)
    assert analyse_here(*runs) == 0
    printed = capsys.readouterr().out
    assert "\n4 runs of 2 folds, " in printed and f" {len(y)} test rows, 1 score; " in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("all rows  ")]
    metrics = [f"{all_folds[name]:.4f}" for name in ("pearson", "baseline_pearson")]
    assert line.split()[3:5] == metrics


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
