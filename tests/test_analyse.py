"""analyse.py: a run's test.tsv, and what is said of one run and of several."""

import itertools
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml

import analyse
from analyse import seconds_of
from data import load
from errors import UserError
from metrics import resampled_pearson
from results import Predictions
from rivals import shared_pairs
from tables import Tables
from tests.conftest import DEFAULTS, write_table
from tests.test_results import HEADER
from tests.tools.runs import ROOT, pack_sets, predictions_of, read_metrics
from train import read_config


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_rows(num_rows: int, num_targets: int = 1) -> Predictions:
    """Returns rows of 0 to 5 genes, of which up to as many are unseen.

    No two rows share a gene. A fifth of the scores is missing.
    """
    y = normal(num_rows, num_targets)
    prediction = y + normal(num_rows, num_targets, seed=1)
    baseline = y + 2 * normal(num_rows, num_targets, seed=2)
    y[normal(num_rows, num_targets, seed=3) > 0.84] = math.nan
    genes = [[f"G{row}.{i}" for i in range(row % 6)] for row in range(num_rows)]
    unseen = [row % (row % 6 + 1) for row in range(num_rows)]
    return Predictions(
        genes=[",".join(names) for names in genes],
        unseen=torch.tensor(unseen).unsqueeze(1).expand(-1, num_targets),
        unseen_genes=[",".join(names[:k]) for names, k in zip(genes, unseen, strict=True)],
        targets=[f"t{t}" for t in range(num_targets)],
        y=y,
        prediction=prediction,
        baseline=baseline,
    )


def chosen_rows(rows: Predictions, chosen: torch.Tensor) -> Predictions:
    """Returns some of the rows, bool [n]."""
    numbers = chosen.nonzero().flatten().tolist()
    fields = {"targets": rows.targets}
    for name in ("genes", "unseen_genes"):
        fields[name] = [getattr(rows, name)[row] for row in numbers]
    for name in ("unseen", "y", "prediction", "baseline"):
        fields[name] = getattr(rows, name)[chosen]
    if rows.sd is not None:
        fields["sd"] = rows.sd[chosen]
    return Predictions(**fields)


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


# ---- Files ---------------------------------------------------------------------------------------
def test_a_run_of_another_version_is_named(tmp_path, analyse_here, capsys):
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, "", 1, 2, 3)])
    (tmp_path / "config.yaml").write_text("log: {threshold: 1}\n")
    assert analyse_here(str(tmp_path)) == 2
    expected = (
        f"error: {tmp_path}/config.yaml: unknown option log.threshold: did you mean "
        f"log.profile_steps?; {tmp_path} is a run of another version of the template: "
        "analyse it with that one, or repeat it\n"
    )
    assert capsys.readouterr().err == expected


def test_the_command_takes_the_threads_of_one_process(analyse_here, monkeypatch):
    taken = []
    monkeypatch.setattr("ddp_setup.choose_threads", lambda count: (3, f"for {count}"))
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert analyse_here("runs/none") == 2
    assert taken == [3]


def test_a_missing_file_and_wrong_arguments_are_one_sentence(tmp_path, analyse_here, capsys):
    assert analyse_here("runs/none") == 2
    expected = (
        "error: cannot read runs/none/test.tsv: No such file or directory; a run writes it when it "
        "finishes\n"
    )
    assert capsys.readouterr().err == expected
    assert analyse_here() == 2
    assert "error: the following arguments are required: RUN" in capsys.readouterr().err
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, "", 1, 2, 3)])
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
    problem = "no comparison with what can be said without the model"
    assert f"{problem}: the tables have changed since the run" in analyse_copy()
    config["data"]["edges"] = "none.tsv"
    missing = "cannot read none.tsv: No such file or directory"
    assert f"{problem}: {missing}" in analyse_copy()
    del result["shared_pairs"]
    del result["rivals"]
    assert json.loads(Path("test.json").read_text()) == result


def test_the_noise_ceiling_is_what_predictions_without_an_error_reach():
    """Of 4,000 rows whose scores have a known noise; a third of one score is missing."""
    truth = normal(4000, 2)
    sd = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = truth + sd.unsqueeze(1) * normal(4000, 2, seed=1)
    y[::3, 1] = math.nan
    rows = replace(predictions_of(y, truth, 0 * truth), sd=sd)
    figures = {name: values.tolist() for name, values in analyse.target_figures(rows).items()}
    assert figures["ceiling_r2"] == pytest.approx([0.75, 0.75], abs=0.02)
    assert figures["r2"] == pytest.approx(figures["ceiling_r2"], abs=0.02)
    assert figures["pearson"] == pytest.approx(figures["ceiling_pearson"], abs=0.02)
    constant = replace(rows, y=0 * truth)
    assert analyse.target_figures(constant)["ceiling_r2"].isnan().all()


def test_a_table_with_sd_is_analysed_beside_its_noise(train, tmp_path, analyse_here, capsys):
    header, *lines = (tmp_path / "scores.tsv").read_text().splitlines()
    rows = [f"{line}\t{0.1 + 0.1 * (i % 5):.1f}" for i, line in enumerate(lines)]
    (tmp_path / "noisy.tsv").write_text("\n".join([f"{header}\tsd", *rows]) + "\n")
    log = train(0, "data.perturbations=noisy.tsv").check().stdout
    assert ", Weighted Pearson " in log
    assert analyse_here("runs/default") == 0
    printed = capsys.readouterr().out
    for title in ("noise ceiling", "weighted Pearson", "weighted baseline", "R2 ceiling"):
        assert title in printed
    result = json.loads(Path("runs/default/test.json").read_text())
    share = result["r2"] / result["ceiling_r2"]
    assert f"R2 is {share:.1%} of the ceiling" in printed


def test_runs_of_other_weights_are_not_compared():
    rows = make_rows(20)
    weighted = replace(rows, weight=torch.ones(20, dtype=torch.float64))
    noisy = replace(rows, sd=torch.ones(20, dtype=torch.float64))
    files = [Path("a"), Path("b")]
    analyse.check_same_rows([noisy, noisy], files)
    for members in itertools.permutations([rows, weighted, noisy], 2):
        with pytest.raises(UserError, match="b has other weights or sd than a"):
            analyse.check_same_rows(list(members), files)


def test_scores_that_vary_no_more_than_their_noise_have_no_ceiling():
    rows = replace(make_rows(40), sd=torch.full((40,), 9.0, dtype=torch.float64))
    assert "R2 has no ceiling" in analyse.noise_text(analyse.analyse(rows))
    rows = replace(rows, sd=torch.full((40,), 1e-9, dtype=torch.float64))
    result = analyse.analyse(rows)
    assert analyse.noise_text(result).startswith(f"R2 is {result['r2']:.1%} of the ceiling")


def test_ranks_do_not_depend_on_an_offset():
    offset = 1e9
    rows = make_rows(200)
    figures = analyse.target_figures(rows, threshold=0.5)
    moved = replace(rows, y=rows.y + offset, prediction=rows.prediction + offset)
    found = analyse.target_figures(moved, threshold=offset + 0.5)
    for name in ("spearman", "auroc", "average_precision"):
        torch.testing.assert_close(found[name], figures[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize("has_sd", [False, True])
def test_groups_are_analysed_as_their_rows_alone(has_sd):
    rows = make_rows(400, 2)
    if has_sd:
        sd = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rows = replace(rows, sd=0.1 + 0.2 * sd)
    result = analyse.analyse(rows)
    deletions = rows.deletions()
    assert deletions.tolist()[:7] == [0, 1, 2, 3, 4, 5, 0]
    for name, count in (("by_unseen", rows.unseen[:, 0]), ("by_deletions", deletions)):
        assert result[name].keys() == {"0", "1", "2", "3"}
        for k, group in result[name].items():
            chosen = (count == int(k)) if k != "3" else (count >= 3)
            part = chosen_rows(rows, chosen)
            alone = analyse.analyse(part)
            # Those without genes are one unit, so that their interval is nan.
            assert json.dumps(group) == json.dumps({key: alone[key] for key in group})
            assert group["n"] == (~part.y.isnan()).any(dim=1).sum()
    for name in result["targets"]["t0"]:
        mean = sum(figures[name] for figures in result["targets"].values()) / 2
        assert result[name] == pytest.approx(mean)
    assert "targets" not in analyse.analyse(make_rows(20))


def test_rows_are_grouped_by_the_level_that_all_their_genes_have():
    rows = make_rows(63)
    cells = ["A", "A=0.3", "A=0.3,B=0.3", "A=0.3,B", "", "A=B", "C=2"]
    levels = ["0", "0.3", "0.3", "several", None, "0", "2"]
    rows.genes = 9 * cells
    of_row = 9 * levels
    result = analyse.analyse(rows)
    assert list(result["by_level"]) == ["0", "0.3", "2", "several"]
    for level, group in result["by_level"].items():
        chosen = torch.tensor([of_this == level for of_this in of_row])
        assert group["n"] == (chosen & ~rows.y[:, 0].isnan()).sum()
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
    rows = replace(make_rows(60, 60), y=y, prediction=signal, baseline=baseline)
    rows.genes = [f"G{row}" for row in range(60)]
    rows.unseen_genes = [""] * 60
    result = analyse.analyse(rows)
    low, high = result["gain"]
    gain = result["pearson"] - result["baseline_pearson"]
    assert low < gain < high < 1
    unit = rows.unit()
    gains = resampled_pearson(y, signal, unit, 100) - resampled_pearson(y, baseline, unit, 100)
    assert gains.quantile(0.975) < gain  # as resamples lack some of these rows


def test_the_interval_of_the_gain_holds_the_difference():
    rows = make_rows(2000)
    rows.genes = [f"G{row}" for row in range(2000)]
    rows.unseen_genes = [""] * 2000
    result = analyse.analyse(rows)
    low, high = result["gain"]
    assert low < result["pearson"] - result["baseline_pearson"] < high
    assert 0.05 < high - low < 0.2


def test_intervals_take_a_bounded_number_of_resamples(monkeypatch):
    """The number is that of the whole table for its groups, too."""
    asked = []

    def count(
        y: torch.Tensor, prediction: torch.Tensor, unit: torch.Tensor, resamples: int
    ) -> torch.Tensor:
        asked.append(resamples)
        return torch.zeros(resamples)

    monkeypatch.setattr("metrics.resampled_pearson", count)
    for cells, expected in ((10**8, 1000), (50_000, 500), (10, 100)):
        monkeypatch.setattr(analyse, "CELLS", cells)
        analyse.analyse(make_rows(50, 2))
        assert set(asked) == {expected}
        asked.clear()


def test_rows_with_a_score_and_all_rows_are_counted(tmp_path, analyse_here, capsys):
    """The second column of counts is empty for a group whose rows all have a score."""
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
    assert first == "test.tsv: rows 9, scores 1"
    assert re.split(r"  +", header)[1:4] == ["rows", "with those without a score", "Pearson"]
    counts = [re.split(r"  +", line)[:3] for line in lines[:3]]
    one, two = "deletions 1", "deletions 2"
    assert counts == [["all", "7", "9"], [one, "4", "1.0000"], [two, "3", "5"]]


def test_a_row_with_one_of_several_scores_has_a_score():
    rows = make_rows(30, 2)
    rows.y[:10] = math.nan
    rows.y[0, 1] = 1.0
    rows.y[10:] = rows.y[10:].nan_to_num()
    result = analyse.analyse(rows)
    assert (result["n"], result["rows"]) == (21, 30)
    assert "rows" not in analyse.analyse(chosen_rows(rows, torch.arange(30) >= 10))


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
def test_the_warnings_of_a_run_stand_at_its_end_in_its_status_and_in_the_analysis(
    train, run, tmp_path
):
    """Each once, also after a second start."""
    path = tmp_path / "scores.tsv"
    path.write_text(path.read_text().replace("Y03", "y03"))
    note = "note      scores.tsv: 3 of 30 knocked-out nodes have no edge: y03 (Y03?), Y"
    for epochs in (1, 2):
        *_, title, last = train(0, f"optim.epochs={epochs}").check().stdout.splitlines()
        assert title == "warnings  1, as above:" or epochs == 2
        assert last.startswith(note)
        status = json.loads((tmp_path / "runs/default/status.json").read_text())
        assert status["warnings"][-1] == last
    command = [sys.executable, ROOT / "analyse.py", "runs/default"]
    says = "runs/default says: "
    assert f"{says}{' '.join(note.split())}" in run(command).check().stdout
    assert says in run([*command, "runs/default"]).check().stdout
    for text in ("{", "[]", "null", '{"warnings": 5}', '{"warnings": null}'):
        (tmp_path / "runs/default/status.json").write_text(text)
        assert says not in run(command).check().stdout


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
