"""analyse.py: a run's test.tsv, and what is said of one run and of several."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml

import analyse
from analyse import seconds_of, shared_pairs
from baseline import additive_baseline
from checkpoint import write_atomically
from data import load
from errors import UserError
from metrics import resampled_pearson
from tables import Tables
from task import KnockoutTask
from tests.conftest import DEFAULTS, write_table
from tests.test_targets import gappy_tables
from tests.tools.runs import pack_sets, read_metrics
from train import read_config

HEADER = ("genes", "unseen", "score", "score_prediction", "score_baseline")


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_rows(num_rows: int, num_targets: int = 1) -> Predictions:
    """Returns rows of 0 to 5 genes, of which up to as many are unseen.

    A fifth of the scores is missing.
    """
    y = normal(num_rows, num_targets)
    prediction = y + normal(num_rows, num_targets, seed=1)
    baseline = y + 2 * normal(num_rows, num_targets, seed=2)
    y[normal(num_rows, num_targets, seed=3) > 0.84] = math.nan
    genes = [",".join(f"G{i}" for i in range(row % 6)) for row in range(num_rows)]
    unseen = torch.tensor([row % (row % 6 + 1) for row in range(num_rows)])
    targets = [f"t{t}" for t in range(num_targets)]
    return Predictions(genes, unseen, targets, y, prediction, baseline)


@pytest.fixture
def analyse_here(monkeypatch, tmp_path):
    """analyse_here(*arguments) runs the command in the test's folder; returns its exit status."""

    def start(*arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["analyse.py", *arguments])
        try:
            analyse.main()
        except SystemExit as stop:
            return stop.code
        return 0

    return start


# ---- The file ------------------------------------------------------------------------------------
def test_the_file_has_the_test_rows_with_scores_predictions_and_baseline(
    train, predict, tmp_path, monkeypatch
):
    options = gappy_tables(tmp_path)
    options += ["data.split=nodes", "data.test_fraction=0.2", "optim.epochs=2"]
    train(2, *options).check()
    monkeypatch.chdir(tmp_path)
    file = Path("runs/default/test.tsv")
    tables = load(read_config([*options, "--config", DEFAULTS]).data)
    rows = tables.rows("test")
    header, *lines = [line.split("\t") for line in file.read_text().splitlines()]
    assert header == [
        "genes", "unseen", "fitness", "fitness_prediction", "fitness_baseline", "size",
        "size_prediction", "size_baseline",
    ]  # fmt: skip
    counts = tables.perturbed_ptr.diff().tolist()
    sets = [nodes.tolist() for nodes in tables.perturbed.split(counts)]
    trained = {node for row in tables.rows("train").tolist() for node in sets[row]}
    assert len(lines) == len(rows) > 30
    for row, (genes, unseen, *_) in zip(rows.tolist(), lines, strict=True):
        assert genes.split(",") == [tables.genes[node] for node in sets[row]]
        assert int(unseen) == len(set(sets[row]) - trained) > 0
    for column in (2, 5):
        assert any(line[column] == "" for line in lines)

    read = read_predictions(file)
    torch.testing.assert_close(read.y, tables.y[rows], rtol=1e-6, atol=1e-6, equal_nan=True)
    baseline = additive_baseline(tables).prediction[rows]
    torch.testing.assert_close(read.baseline, baseline, rtol=1e-6, atol=1e-6)
    write_table(tmp_path / "ask.tsv", [("genes",), *((line[0],) for line in lines)])
    predict(0, "ask.tsv", "runs/default").check()
    asked = []
    for line in Path("ask.predictions.tsv").read_text().splitlines()[1:]:
        asked.append([float(cell) for cell in line.split("\t")[1:]])
    expected = torch.tensor(asked, dtype=torch.float64)
    torch.testing.assert_close(read.prediction, expected, rtol=1e-5, atol=1e-5)

    (test,) = read_metrics(Path("runs/default"), "test")
    found = analyse.analyse(read)
    for key in ("mse", "pearson", "baseline_pearson", "n"):
        assert found[key] == pytest.approx(test[key], rel=1e-4)


@pytest.mark.parametrize("num_rows", [1, 99, 100, 250])
def test_what_is_written_is_read(tmp_path, num_rows):
    """Rows are written in parts of 100; a prediction that is not a number stays so."""
    sets = [list(range(row % 4)) for row in range(2 * num_rows)]
    split = torch.tensor([2, 0] * num_rows, dtype=torch.int8)
    y = normal(2 * num_rows, 2)
    baseline = normal(2 * num_rows, 2, seed=1)
    y[0, 1] = math.nan
    genes = ["a", "b", "ü\x85\u2028", "nan"]  # of which some are line ends elsewhere
    edges = torch.zeros(2, 0), torch.zeros(0)
    tables = Tables(genes, ["r"], *edges, *pack_sets(sets), y, split, targets=["s", "s_prediction"])
    prediction = normal(num_rows, 2, seed=2)
    prediction[-1, 0] = math.nan
    task = SimpleNamespace(tables=tables, baseline=SimpleNamespace(prediction=baseline))
    write_atomically(tmp_path / "test.tsv", KnockoutTask.result_lines(task, prediction))
    read = read_predictions(tmp_path / "test.tsv")
    assert read.targets == ["s", "s_prediction"]
    assert read.genes == [",".join(genes[node] for node in nodes) for nodes in sets[::2]]
    assert read.deletions().tolist() == [len(nodes) for nodes in sets[::2]]
    for name, values in (("y", y[::2]), ("prediction", prediction), ("baseline", baseline[::2])):
        torch.testing.assert_close(getattr(read, name), values, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [HEADER[:4]],
            r"test.tsv:1: the header is not genes, unseen, and three columns for each score; start "
            r"the run",
        ),
        ([("genes", "unseen")], r"test.tsv:1: the header is not"),
        ([HEADER], r"test.tsv:1: there are no rows"),
        ([HEADER, ("a", 0, 1, 2, 3), ("a", 0, 1, 2)], r"test.tsv:3: 4 cells under 5 columns"),
        ([HEADER, ("a", "x", 1, 2, 3)], r"test.tsv:2: invalid literal for int"),
        ([HEADER, ("a", 0, 1, 2, "x")], r"test.tsv:2: could not convert string to float: 'x'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, table, message):
    write_table(tmp_path / "test.tsv", table)
    with pytest.raises(UserError, match=message):
        read_predictions(tmp_path / "test.tsv")


def test_a_run_of_another_version_is_named(tmp_path, analyse_here, capsys):
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, 1, 2, 3)])
    (tmp_path / "config.yaml").write_text("log: {threshold: 1}\n")
    assert analyse_here(str(tmp_path)) == 2
    expected = (
        f"error: {tmp_path}/config.yaml: unknown option log.threshold: did you mean "
        f"log.profile_steps?; {tmp_path} is a run of another version of the template: "
        "analyse it with that one, or repeat it\n"
    )
    assert capsys.readouterr().err == expected


def test_a_missing_file_and_wrong_arguments_are_one_sentence(tmp_path, analyse_here, capsys):
    assert analyse_here("runs/none") == 2
    expected = (
        "error: cannot read runs/none/test.tsv: No such file or directory; a run writes it when it "
        "finishes\n"
    )
    assert capsys.readouterr().err == expected
    assert analyse_here() == 2
    assert "error: the following arguments are required: RUN" in capsys.readouterr().err
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, 1, 2, 3)])
    assert analyse_here(".") == 2
    assert capsys.readouterr().err.startswith("error: cannot read the configuration config.yaml: ")
    (tmp_path / "config.yaml").touch()
    assert analyse_here(".", "--threshold", "-1.5") == 2
    assert capsys.readouterr().err == "error: test.tsv has no score below --threshold=-1.5\n"


# ---- One run -------------------------------------------------------------------------------------
def test_groups_of_rows_are_printed_and_written(train, tables, tmp_path, analyse_here, capsys):
    options = ["data.split=nodes", "data.test_fraction=0.2"]
    train(0, *options).check()
    assert analyse_here("runs/default", "--threshold=1") == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(Path("runs/default/test.json").read_text())
    assert result["by_unseen"].keys() >= {"1", "2"}
    assert result["by_deletions"].keys() == {"1", "2", "3"}
    assert sum(group["n"] for group in result["by_unseen"].values()) == result["n"]
    first = result["by_unseen"]["1"]
    assert first["baseline_pearson"] != result["baseline_pearson"]
    assert 0 < first["average_precision"] <= 1
    (line,) = [line for line in lines if line.startswith("unseen 1 ")]
    low, high = first["gain"]
    cells = [f"{first['n']:,}", f"{first['pearson']:.4f}", f"{first['baseline_pearson']:.4f}"]
    assert re.split(r"  +", line)[1:5] == [*cells, f"{low:.4f} to {high:.4f}"]
    own = load(read_config([*tables, *options, "--config", DEFAULTS]).data)
    assert result["shared_pairs"] == shared_pairs(own)
    assert f"{result['shared_pairs']} rows knock out two nodes of a training row" in lines
    ElementTree.parse("runs/default/test.svg")


def test_a_copy_of_the_run_folder_suffices_but_for_one_line(train, tmp_path, analyse_here, capsys):
    train(0, "data.split=nodes", "data.test_fraction=0.2").check()
    assert analyse_here("runs/default", "--threshold=1") == 0
    result = json.loads(Path("runs/default/test.json").read_text())
    config = yaml.safe_load(Path("runs/default/config.yaml").read_text())

    def analyse_copy() -> str:
        Path("config.yaml").write_text(yaml.safe_dump(config))
        capsys.readouterr()
        assert analyse_here(".", "--threshold=1") == 0
        return capsys.readouterr().out

    shutil.move("runs/default/test.tsv", "test.tsv")
    analyse_copy()
    assert json.loads(Path("test.json").read_text()) == result
    config["data"]["split_seed"] = 1
    assert "were not counted: the tables have changed since the run" in analyse_copy()
    config["data"]["edges"] = "none.tsv"
    missing = "cannot read none.tsv: No such file or directory"
    assert f"were not counted: {missing}" in analyse_copy()
    del result["shared_pairs"]
    assert json.loads(Path("test.json").read_text()) == result


def test_groups_are_analysed_as_their_rows_alone():
    rows = make_rows(400, 2)
    result = analyse.analyse(rows)
    deletions = rows.deletions()
    assert deletions.tolist()[:7] == [0, 1, 2, 3, 4, 5, 0]
    for name, count in (("by_unseen", rows.unseen), ("by_deletions", deletions)):
        assert result[name].keys() == {"0", "1", "2", "3"}
        for k, group in result[name].items():
            chosen = (count == int(k)) if k != "3" else (count >= 3)
            part = Predictions(
                [genes for genes, keep in zip(rows.genes, chosen.tolist(), strict=True) if keep],
                rows.unseen[chosen],
                rows.targets,
                rows.y[chosen],
                rows.prediction[chosen],
                rows.baseline[chosen],
            )
            alone = analyse.analyse(part)
            assert group == {key: alone[key] for key in group}
            assert group["n"] == chosen.sum()
    for name in result["targets"]["t0"]:
        mean = sum(figures[name] for figures in result["targets"].values()) / 2
        assert result[name] == pytest.approx(mean)
    assert "targets" not in analyse.analyse(make_rows(20))


def test_rows_are_grouped_by_the_level_that_all_their_genes_have():
    rows = make_rows(63)
    cells = ["A", "A=0.3", "A=0.3,B=0.3", "A=0.3,B", "", "A=B", "C=2"]
    levels = ["0", "0.3", "0.3", "several", "0", "0", "2"]
    rows.genes = 9 * cells
    of_row = 9 * levels
    result = analyse.analyse(rows)
    assert list(result["by_level"]) == ["0", "0.3", "2", "several"]
    for level, group in result["by_level"].items():
        chosen = torch.tensor([of_this == level for of_this in of_row])
        assert group["n"] == chosen.sum()
        squared_error = (rows.y - rows.prediction)[chosen].square()
        assert group["mse"] == pytest.approx(squared_error.nanmean().item())
    assert any(line.startswith("level 0.3 ") for line in analyse.table(result))
    rows.genes = [*["A=0.3", "B=0.3,C=0.3"] * 31, "A=0.3"]
    assert analyse.analyse(rows)["by_level"] == {}


def test_many_scores_are_printed_in_part():
    lines = analyse.table(analyse.analyse(make_rows(50, analyse.SHOWN + 3)))
    assert sum(line.startswith("t") for line in lines) == analyse.SHOWN
    *lines, more, quartiles, of_baseline = lines
    assert more == "and 3 more scores, which are in test.json"
    assert re.fullmatch(r"Pearson, quartiles over the scores: (0\.\d{4}(, |$)){3}", quartiles)
    assert of_baseline.startswith("baseline, quartiles over the scores: ")
    assert len({len(line) for line in lines}) == 1


def test_undefined_figures_are_null_and_a_dash(tmp_path, analyse_here, capsys):
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, "", 2, 3), ("b", 1, "", 1, 3)])
    (tmp_path / "config.yaml").touch()
    assert analyse_here(".") == 0
    result = json.loads((tmp_path / "test.json").read_text())
    assert result["n"] == 2
    assert result["pearson"] is result["mse"] is None
    assert result["gain"] == [None, None]
    assert re.split(r"  +", capsys.readouterr().out.splitlines()[2])[1:4] == ["2", "-", "-"]
    ElementTree.parse(tmp_path / "test.svg")


def test_figures_of_profiles_equal_their_definitions():
    """The last row has two scores, which are among its twenty largest."""
    rows = make_rows(30, 40)
    rows.y[-1, 2:] = math.nan
    found = analyse.analyse(rows)
    r = []
    baseline_r = []
    errors = []
    for y, prediction, baseline in zip(
        *(x.numpy() for x in (rows.y, rows.prediction, rows.baseline)), strict=True
    ):
        is_there = ~np.isnan(y)
        y, prediction, baseline = (values[is_there] for values in (y, prediction, baseline))
        r.append(np.corrcoef(y, prediction)[0, 1])
        baseline_r.append(np.corrcoef(y, baseline)[0, 1])
        largest = sorted(range(len(y)), key=lambda t, y=y: -abs(y[t]))[:20]
        errors += list((y - prediction)[largest] ** 2)
    assert found["row_pearson"] == pytest.approx(np.mean(r))
    assert found["baseline_row_pearson"] == pytest.approx(np.mean(baseline_r))
    assert found["mse_top20"] == pytest.approx(np.mean(errors))
    of_targets = [values["pearson"] for values in found["targets"].values()]
    quartiles = np.quantile(of_targets, [0.25, 0.5, 0.75])
    assert found["pearson_quartiles"] == pytest.approx(quartiles)
    low, high = found["row_gain"]
    assert low < found["row_pearson"] - found["baseline_row_pearson"] < high
    assert "row_pearson" in found["by_unseen"]["0"]
    assert "row_pearson" not in analyse.analyse(make_rows(30, 20))


def test_the_interval_of_profiles_holds_the_difference_though_few_rows_change_a_score():
    signal = torch.zeros(60, 60, dtype=torch.float64)
    signal[range(60), range(60)] = 3.0  # each row changes a score of its own
    y = signal + 0.5 * normal(60, 60)
    baseline = normal(60, 60, seed=1)
    targets = [f"t{t}" for t in range(60)]
    rows = Predictions(["A"] * 60, torch.zeros(60).long(), targets, y, signal, baseline)
    result = analyse.analyse(rows)
    low, high = result["gain"]
    gain = result["pearson"] - result["baseline_pearson"]
    assert low < gain < high < 1
    gains = resampled_pearson(y, signal, 100) - resampled_pearson(y, baseline, 100)
    assert gains.quantile(0.975) < gain  # as resamples lack some of these rows


def test_the_interval_of_the_gain_holds_the_difference():
    result = analyse.analyse(make_rows(2000))
    low, high = result["gain"]
    assert low < result["pearson"] - result["baseline_pearson"] < high
    assert 0.05 < high - low < 0.2


def test_intervals_take_a_bounded_number_of_resamples(monkeypatch):
    """The number is that of the whole table for its groups, too."""
    asked = []

    def count(y: torch.Tensor, prediction: torch.Tensor, resamples: int) -> torch.Tensor:
        asked.append(resamples)
        return torch.zeros(resamples)

    monkeypatch.setattr("metrics.resampled_pearson", count)
    for cells, expected in ((10**8, 1000), (50_000, 500), (10, 100)):
        monkeypatch.setattr(analyse, "CELLS", cells)
        analyse.analyse(make_rows(50, 2))
        assert set(asked) == {expected}
        asked.clear()


def test_test_rows_with_a_pair_of_a_training_row_are_counted():
    def tables(sets: list[list[int]], split: list[int]) -> Tables:
        y = torch.arange(float(len(sets)))
        names = [f"g{i}" for i in range(20)]
        edges = torch.tensor([[0], [1]]), torch.tensor([0])
        return Tables(names, ["r"], *edges, *pack_sets(sets), y, torch.tensor(split).char())

    sets = [[0, 1, 2], [3], [], [0, 1], [0, 2, 4], [0, 3], [4, 5], [1, 2]]
    assert shared_pairs(tables(sets, [0, 0, 0, 2, 2, 2, 2, 1])) == 2
    assert shared_pairs(tables([[1], [2], [1]], [0, 1, 2])) == 0


def test_the_plot_has_at_most_two_thousand_points_evenly_chosen():
    rows = make_rows(3000, 2)
    rows.y *= torch.tensor([1.0, 1000.0])
    rows.prediction = rows.y
    svg = analyse.plot(rows)
    assert svg.count("<circle") == analyse.POINTS
    assert svg.count("(standard units)") == 2
    points = [point for point in ElementTree.fromstring(svg).iter() if point.tag.endswith("circle")]
    x = torch.tensor([float(point.get("cx")) for point in points])
    y = torch.tensor([float(point.get("cy")) for point in points])
    torch.testing.assert_close(x + y, torch.full((2000,), 400.0), rtol=0, atol=0.11)
    assert 0 <= x.min() < x.max() <= 400
    assert 40 < x.std() < 80  # of both targets
    few = make_rows(30)
    assert analyse.plot(few).count("<circle") == (~few.y.isnan()).sum() < 30
    assert "standard" not in analyse.plot(few)


# ---- Several runs --------------------------------------------------------------------------------
def test_runs_are_compared_alone_and_together(train, tmp_path, analyse_here, capsys):
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

    # First the runs side by side.
    header, *rows = [re.split(r"  +", line.strip()) for line in lines[:4]]
    assert header == [
        "run.seed", "model.layers", "model.readout", "best step", "val loss", "test loss",
        "val pearson", "test pearson", "seconds",
    ]  # fmt: skip
    for name, chosen in zip("abc", (["1", "2"], ["2", "2"], ["0", "1"]), strict=True):
        run, seed, layers, readout, step, *figures, seconds = rows["abc".index(name)]
        (test,) = read_metrics(tmp_path / "runs" / name, "test")
        val_rows = read_metrics(tmp_path / "runs" / name, "val")
        (val,) = [row for row in val_rows if row["step"] == test["best_step"]]
        assert (run, seed, layers) == (f"runs/{name}", *chosen)
        assert (readout == "local") is (name == "c")
        assert int(step) == test["best_step"]
        expected = [row[key] for key in ("loss", "pearson") for row in (val, test)]
        assert [float(figure) for figure in figures] == pytest.approx(expected, abs=1e-4)
        assert 0 <= int(seconds) < 60
    assert lines[4] == ""

    # Then their predictions.
    figures = {line.split("  ")[0].strip(): line for line in lines[7:12]}
    assert list(figures) == ["runs/a", "runs/b", "runs/c", "mean of these", "ensemble"]
    pearson = [float(re.search(r"-?0\.\d+", line)[0]) for line in list(figures.values())[:4]]
    assert pearson[3] == pytest.approx(sum(pearson[:3]) / 3, abs=2e-4)
    assert " to " in figures["ensemble"]
    assert " to " not in figures["runs/a"]
    assert lines[12].startswith("Spearman of standard deviation and absolute error: ")
    assert lines[13].count(",") == 4

    train(0, "data.split_seed=1", "run.name=other").check()
    assert analyse_here("runs/a", "runs/other") == 2
    message = "runs/other/test.tsv has other test rows than runs/a/test.tsv: compare runs of one"
    assert f"error: {message}" in capsys.readouterr().err


def test_the_seconds_of_a_run_are_those_between_its_starts_and_ends():
    """A killed run has no end; what it did until then is not known."""
    events = [("started", 1), ("stopped", 4), ("resumed", 10), ("resumed", 20), ("failed", 25.5)]
    events.append(("failed", 26))  # once more, while it ended
    rows = [{"kind": "event", "event": event, "time": time} for event, time in events]
    rows.insert(1, {"kind": "train", "step": 1})
    assert seconds_of(rows) == 8.5
    assert seconds_of(rows[:1]) == 0


def test_a_cut_line_of_metrics_is_left_out_and_a_missing_file_is_named(
    train, tmp_path, analyse_here, capsys
):
    train(0, "run.name=a").check()
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/b")
    with (tmp_path / "runs/b/metrics.jsonl").open("a") as file:
        file.write('{"a": 1}\n5\n{"kind": "tr')
    assert analyse_here("runs/a", "runs/b") == 0
    of_a, of_b = capsys.readouterr().out.splitlines()[1:3]
    assert of_a.removeprefix("runs/a") == of_b.removeprefix("runs/b")
    (tmp_path / "runs/b/metrics.jsonl").unlink()
    assert analyse_here("runs/a", "runs/b") == 2
    assert "error: cannot read runs/b/metrics.jsonl: " in capsys.readouterr().err
