"""A run's test.tsv, and what `python -m tests.check test` makes of it."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml

from baseline import additive_baseline
from checkpoint import write_atomically
from data import load
from errors import UserError
from tables import Tables
from tests import check
from tests.conftest import write_table
from tests.test_targets import gappy_tables
from tests.tools import analysis
from tests.tools.analysis import (
    Predictions,
    analyse,
    figures,
    interval,
    read_predictions,
    resampled_pearson,
    table,
)
from tests.tools.runs import pack_sets, read_metrics
from train import read_config, result_lines

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
    return Predictions(
        genes, unseen, [f"t{t}" for t in range(num_targets)], y, prediction, baseline
    )


def run_check(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check", "test", *arguments])
    with pytest.raises(SystemExit) as raised:
        check.main()
    return raised.value.code


# ---- The file ------------------------------------------------------------------------------------
def test_the_file_has_the_test_rows_with_scores_predictions_and_baseline(
    train, tmp_path, monkeypatch
):
    options = [
        *gappy_tables(tmp_path),
        "data.split=nodes",
        "data.test_fraction=0.2",
        "optim.epochs=2",
    ]
    train(2, *options).check()
    monkeypatch.chdir(tmp_path)
    tables = load(read_config([*options, "--config=/dev/null"]).data)
    rows = tables.rows("test")
    header, *lines = [
        line.split("\t") for line in Path("runs/default/test.tsv").read_text().splitlines()
    ]
    assert header == [
        "genes", "unseen", "fitness", "fitness_prediction", "fitness_baseline", "size",
        "size_prediction", "size_baseline",
    ]  # fmt: skip
    sets = [
        nodes.tolist() for nodes in tables.perturbed.split(tables.perturbed_ptr.diff().tolist())
    ]
    trained = {node for row in tables.rows("train").tolist() for node in sets[row]}
    assert len(lines) == len(rows) > 30
    for row, (genes, unseen, *_) in zip(rows.tolist(), lines, strict=True):
        assert genes.split(",") == [tables.genes[node] for node in sets[row]]
        assert int(unseen) == len(set(sets[row]) - trained) > 0
    assert any(line[2] == "" for line in lines) and any(line[5] == "" for line in lines)

    read = read_predictions(Path("runs/default/test.tsv"))
    torch.testing.assert_close(read.y, tables.y[rows], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(
        read.baseline, additive_baseline(tables).prediction[rows], rtol=1e-6, atol=1e-6
    )
    write_table(tmp_path / "ask.tsv", [("genes",), *((line[0],) for line in lines)])
    train(0, *options, "--predict=ask.tsv", "--checkpoint=runs/default/checkpoints/best.pt").check()
    asked = [
        line.split("\t")[1:]
        for line in (tmp_path / "ask.predictions.tsv").read_text().splitlines()[1:]
    ]
    expected = torch.tensor([list(map(float, row)) for row in asked]).double()
    torch.testing.assert_close(read.prediction, expected, rtol=1e-5, atol=1e-5)

    (test,) = read_metrics(Path("runs/default"), "test")
    found = analyse(read)
    for key in ("mse", "pearson", "baseline_pearson", "n"):
        assert found[key] == pytest.approx(test[key], rel=1e-4)


@pytest.mark.parametrize("num_rows", [1, 99, 100, 250])
def test_what_is_written_is_read(tmp_path, num_rows):
    """Rows are written in parts of 100; a prediction that is not a number stays so."""
    sets = [list(range(row % 4)) for row in range(2 * num_rows)]
    split = torch.tensor([2, 0] * num_rows, dtype=torch.int8)
    y, baseline = normal(2 * num_rows, 2), normal(2 * num_rows, 2, seed=1)
    y[0, 1] = math.nan
    genes = ["a", "b", "ü\x85\u2028", "nan"]  # of which some are line ends elsewhere
    edges = torch.zeros(2, 0), torch.zeros(0)
    tables = Tables(genes, ["r"], *edges, *pack_sets(sets), y, split, targets=["s", "s_prediction"])
    prediction = normal(num_rows, 2, seed=2)
    prediction[-1, 0] = math.nan
    write_atomically(tmp_path / "test.tsv", result_lines(tables, prediction, baseline))
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


def test_a_run_of_another_version_is_named(tmp_path, monkeypatch, capsys):
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, 1, 2, 3)])
    (tmp_path / "config.yaml").write_text("log: {threshold: 1}\n")
    assert run_check(monkeypatch, str(tmp_path)) == 2
    expected = (
        "error: unknown option log.threshold: did you mean log.profile_steps? "
        f"({tmp_path}/config.yaml); "
        "analyse a run with the version of the template that wrote it, or repeat it with this one\n"
    )
    assert capsys.readouterr().err == expected


def test_a_missing_file_and_wrong_arguments_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_check(monkeypatch, "runs/none") == 2
    expected = (
        "error: cannot read runs/none/test.tsv: No such file or directory; a run writes it when it "
        "finishes\n"
    )
    assert capsys.readouterr().err == expected
    assert run_check(monkeypatch) == 2
    assert capsys.readouterr().err == "error: test takes run folders, such as runs/default\n"
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, 1, 2, 3)])
    assert run_check(monkeypatch, ".") == 2
    assert capsys.readouterr().err.startswith("error: cannot read the configuration config.yaml: ")
    (tmp_path / "config.yaml").touch()
    assert run_check(monkeypatch, ".", "--threshold", "-1.5") == 2
    assert capsys.readouterr().err == "error: test.tsv has no score below --threshold=-1.5\n"


# ---- The check -----------------------------------------------------------------------------------
def test_the_check_prints_and_writes_groups_of_rows(train, tables, tmp_path, monkeypatch, capsys):
    options = ["data.split=nodes", "data.test_fraction=0.2"]
    train(0, *options).check()
    monkeypatch.chdir(tmp_path)
    assert not run_check(monkeypatch, "runs/default", "--threshold=1")
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(Path("runs/default/test.json").read_text())
    assert result["by_unseen"].keys() >= {"1", "2"} and result["by_deletions"].keys() == {
        "1",
        "2",
        "3",
    }
    assert sum(group["n"] for group in result["by_unseen"].values()) == result["n"]
    first = result["by_unseen"]["1"]
    assert (
        first["baseline_pearson"] != result["baseline_pearson"]
        and 0 < first["average_precision"] <= 1
    )
    (line,) = [line for line in lines if line.startswith("unseen 1 ")]
    low, high = first["gain"]
    cells = [f"{first['n']:,}", f"{first['pearson']:.4f}", f"{first['baseline_pearson']:.4f}"]
    assert re.split(r"  +", line)[1:5] == [*cells, f"{low:.4f} to {high:.4f}"]
    own = load(read_config([*tables, *options, "--config=/dev/null"]).data)
    assert result["shared_pairs"] == analysis.shared_pairs(own)
    assert f"{result['shared_pairs']} rows knock out two nodes of a training row" in lines
    ElementTree.parse("runs/default/test.svg")

    # A copy of the run folder suffices, but for one line.
    shutil.move("runs/default/test.tsv", "test.tsv")
    config = yaml.safe_load(Path("runs/default/config.yaml").read_text())
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert not run_check(monkeypatch, ".", "--threshold=1")
    again = json.loads(Path("test.json").read_text())
    assert again == result
    config["data"]["split_seed"] = 1
    Path("config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert not run_check(monkeypatch, ".", "--threshold=1")
    assert "were not counted: the tables have changed since the run" in capsys.readouterr().out
    config["data"]["edges"] = "none.tsv"
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert not run_check(monkeypatch, ".", "--threshold=1")
    assert (
        "were not counted: cannot read none.tsv: No such file or directory"
        in capsys.readouterr().out
    )
    del result["shared_pairs"]
    assert json.loads(Path("test.json").read_text()) == result


def test_groups_are_analysed_as_their_rows_alone():
    rows = make_rows(400, 2)
    result = analyse(rows)
    deletions = rows.deletions()
    assert deletions.tolist()[:7] == [0, 1, 2, 3, 4, 5, 0]
    for name, count in (("by_unseen", rows.unseen), ("by_deletions", deletions)):
        assert result[name].keys() == {"0", "1", "2", "3"}
        for k, group in result[name].items():
            chosen = (count == int(k)) if k != "3" else (count >= 3)
            part = Predictions(
                [genes for genes, keep in zip(rows.genes, chosen.tolist(), strict=True) if keep],
                rows.unseen[chosen], rows.targets, rows.y[chosen], rows.prediction[chosen],
                rows.baseline[chosen],
            )  # fmt: skip
            alone = analyse(part)
            assert group == {key: alone[key] for key in group} and group["n"] == chosen.sum()
    assert {
        name: sum(each[name] for each in result["targets"].values()) / 2
        for name in result["targets"]["t0"]
    } == (pytest.approx({name: result[name] for name in result["targets"]["t0"]}))
    assert "targets" not in analyse(make_rows(20))


def test_rows_are_grouped_by_the_level_that_all_their_genes_have():
    rows = make_rows(60)
    cells = ["A", "A=0.3", "A=0.3,B=0.3", "A=0.3,B", "", "A=B", "C=2"]
    levels = ["0", "0.3", "0.3", "several", "0", "0", "2"]
    rows.genes = [cells[k % 7] for k in range(60)]
    of_row = [levels[k % 7] for k in range(60)]
    result = analyse(rows)
    assert list(result["by_level"]) == ["0", "0.3", "2", "several"]
    for level, group in result["by_level"].items():
        chosen = torch.tensor([own == level for own in of_row])
        assert group["n"] == chosen.sum()
        assert group["mse"] == pytest.approx(
            (rows.y - rows.prediction)[chosen].square().nanmean().item()
        )
    assert any(line.startswith("level 0.3 ") for line in table(result))
    rows.genes = ["A=0.3", "B=0.3,C=0.3"] * 30
    assert analyse(rows)["by_level"] == {}


def test_many_scores_are_printed_in_part(capsys):
    lines = analysis.table(analyse(make_rows(50, analysis.SHOWN + 3)))
    assert sum(line.startswith("t") for line in lines) == analysis.SHOWN
    *lines, more, quartiles, of_baseline = lines
    assert more == "and 3 more scores, which are in test.json"
    assert re.fullmatch(r"Pearson, quartiles over the scores: (0\.\d{4}(, |$)){3}", quartiles)
    assert of_baseline.startswith("baseline, quartiles over the scores: ")
    assert len({len(line) for line in lines}) == 1


def test_undefined_figures_are_null_and_a_dash(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "test.tsv", [HEADER, ("a", 0, "", 2, 3), ("b", 1, "", 1, 3)])
    (tmp_path / "config.yaml").touch()
    assert not run_check(monkeypatch, ".")
    result = json.loads((tmp_path / "test.json").read_text())
    assert (
        result["n"] == 2
        and result["pearson"] is result["mse"] is None
        and result["gain"] == [None, None]
    )
    assert re.split(r"  +", capsys.readouterr().out.splitlines()[2])[1:4] == ["2", "-", "-"]
    ElementTree.parse(tmp_path / "test.svg")


# ---- Figures -------------------------------------------------------------------------------------
def test_figures_equal_their_definitions():
    y, prediction, baseline = torch.randint(
        -4, 5, (3, 60, 1), generator=torch.Generator().manual_seed(0)
    ).double()
    found = analysis.target_figures(y, prediction, baseline, threshold=-1.5)
    missing = torch.full((20, 1), math.nan)
    more = [
        torch.cat([y, missing]),
        torch.cat([prediction, normal(20, 1)]),
        torch.cat([baseline, normal(20, 1)]),
    ]
    with_gaps = analysis.target_figures(*more, threshold=-1.5)
    for name, value in found.items():
        torch.testing.assert_close(with_gaps[name], value)
    found = {name: value.item() for name, value in found.items()}
    zeros_and_ones = analysis.target_figures(
        (y < -1.5).double(), -prediction, baseline, loss="binary"
    )
    assert all(
        zeros_and_ones[name].item() == found[name] for name in ("auroc", "average_precision")
    )
    y, prediction, baseline = (values[:, 0].numpy() for values in (y, prediction, baseline))
    assert found["mse"] == pytest.approx(((y - prediction) ** 2).mean())
    assert found["r2"] == pytest.approx(
        1 - ((y - prediction) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    )
    assert found["pearson"] == pytest.approx(np.corrcoef(y, prediction)[0, 1])
    assert found["baseline_pearson"] == pytest.approx(np.corrcoef(y, baseline)[0, 1])
    hit, miss = prediction[y < -1.5], prediction[y >= -1.5]
    wins = (hit[:, None] < miss).mean() + (hit[:, None] == miss).mean() / 2
    assert found["auroc"] == pytest.approx(wins)
    precision = [(y[prediction <= value] < -1.5).mean() for value in hit]
    assert found["average_precision"] == pytest.approx(np.mean(precision))


def test_scores_that_are_constant_have_no_r2():
    found = figures(torch.ones(5, 1).double(), normal(5, 1))
    assert found["r2"].isnan() and found["pearson"].isnan() and found["mse"] > 0


def test_resampled_pearson_equals_that_of_torch_on_the_same_rows():
    """The third target's scores are constant, the second's predictions: it counts as 0."""
    y = torch.stack([normal(50), 1000 + normal(50, seed=1), torch.full((50,), 0.1).double()], dim=1)
    prediction = torch.stack(
        [y[:, 0] + normal(50, seed=2), torch.full((50,), 0.7).double(), normal(50)], dim=1
    )
    y[10:15, 0] = math.nan
    found = resampled_pearson(y, prediction, 5)
    generator = torch.Generator().manual_seed(0)
    for r in found:
        rows = torch.randint(50, (50,), generator=generator)
        rows = rows[~y[rows, 0].isnan()]
        expected = torch.corrcoef(torch.stack([y[rows, 0], prediction[rows, 0]]))[0, 1]
        torch.testing.assert_close(r, expected / 2)


def test_a_resample_of_one_row_has_no_pearson():
    y, prediction = normal(3, 1), normal(3, 1, seed=1)
    generator = torch.Generator().manual_seed(0)
    undefined = 0
    for r in resampled_pearson(y, prediction, 200):
        rows = torch.randint(3, (3,), generator=generator)
        if len(rows.unique()) == 1:
            undefined += 1
            assert r.isnan()
        else:
            expected = torch.corrcoef(torch.cat([y, prediction], dim=1)[rows].T)[0, 1]
            torch.testing.assert_close(r, expected)
    assert undefined > 10


def test_figures_of_profiles_equal_their_definitions():
    """The last row has two scores, which are among its twenty largest."""
    rows = make_rows(30, 40)
    rows.y[-1, 2:] = math.nan
    found = analyse(rows)
    r, baseline_r, errors = [], [], []
    for y, prediction, baseline in zip(
        *(x.numpy() for x in (rows.y, rows.prediction, rows.baseline)), strict=True
    ):
        there = ~np.isnan(y)
        y, prediction, baseline = (values[there] for values in (y, prediction, baseline))
        r.append(np.corrcoef(y, prediction)[0, 1])
        baseline_r.append(np.corrcoef(y, baseline)[0, 1])
        largest = sorted(range(len(y)), key=lambda t: -abs(y[t]))[:20]
        errors += list((y - prediction)[largest] ** 2)
    assert found["row_pearson"] == pytest.approx(np.mean(r))
    assert found["baseline_row_pearson"] == pytest.approx(np.mean(baseline_r))
    assert found["mse_top20"] == pytest.approx(np.mean(errors))
    each = [values["pearson"] for values in found["targets"].values()]
    assert found["pearson_quartiles"] == pytest.approx(np.quantile(each, [0.25, 0.5, 0.75]))
    low, high = found["row_gain"]
    assert low < found["row_pearson"] - found["baseline_row_pearson"] < high
    assert "row_pearson" in found["by_unseen"]["0"] and "row_pearson" not in analyse(
        make_rows(30, 20)
    )


def test_the_interval_of_profiles_holds_the_difference_though_few_rows_change_a_score():
    signal = torch.zeros(60, 60, dtype=torch.float64)
    signal[range(60), range(60)] = 3.0  # each row changes a score of its own
    rows = Predictions(
        ["A"] * 60, torch.zeros(60).long(), [f"t{t}" for t in range(60)], *[signal] * 3
    )
    rows.y = signal + 0.5 * normal(60, 60)
    rows.baseline = normal(60, 60, seed=1)
    result = analyse(rows)
    low, high = result["gain"]
    gain = result["pearson"] - result["baseline_pearson"]
    assert low < gain < high < 1
    gains = resampled_pearson(rows.y, rows.prediction, 100) - resampled_pearson(
        rows.y, rows.baseline, 100
    )
    assert gains.quantile(0.975) < gain  # as resamples lack some of these rows


def test_a_resampled_mean_is_of_the_rows_of_a_resampled_pearson():
    values = normal(50)
    values[10:15] = math.nan
    generator = torch.Generator().manual_seed(0)
    found = analysis.resampled_mean(values, 70)
    assert len(found) == 70
    for mean in found:
        rows = torch.randint(50, (50,), generator=generator)
        torch.testing.assert_close(mean, values[rows].nanmean())


def test_the_interval_of_the_gain_holds_the_difference():
    rows = make_rows(2000)
    result = analyse(rows)
    low, high = result["gain"]
    assert low < result["pearson"] - result["baseline_pearson"] < high and 0.05 < high - low < 0.2
    assert interval(torch.linspace(0, 1, 1001)) == pytest.approx([0.025, 0.975])


def test_intervals_take_a_bounded_number_of_resamples(monkeypatch):
    """The number is that of the whole table for its groups, too."""
    asked = []
    monkeypatch.setattr(
        analysis,
        "resampled_pearson",
        lambda y, x, number: asked.append(number) or torch.zeros(number),
    )
    for cells, expected in ((10**8, 1000), (50_000, 500), (10, 100)):
        monkeypatch.setattr(analysis, "CELLS", cells)
        analyse(make_rows(50, 2))
        assert set(asked) == {expected}
        asked.clear()


def test_test_rows_with_a_pair_of_a_training_row_are_counted():
    def tables(sets: list[list[int]], split: list[int]) -> Tables:
        y = torch.arange(float(len(sets)))
        names = [f"g{i}" for i in range(20)]
        edges = torch.tensor([[0], [1]]), torch.tensor([0])
        return Tables(names, ["r"], *edges, *pack_sets(sets), y, torch.tensor(split).char())

    sets = [[0, 1, 2], [3], [], [0, 1], [0, 2, 4], [0, 3], [4, 5], [1, 2]]
    assert analysis.shared_pairs(tables(sets, [0, 0, 0, 2, 2, 2, 2, 1])) == 2
    assert analysis.shared_pairs(tables([[1], [2], [1]], [0, 1, 2])) == 0


# ---- The plot ------------------------------------------------------------------------------------
def test_the_plot_has_at_most_two_thousand_points_evenly_chosen():
    rows = make_rows(3000, 2)
    rows.y *= torch.tensor([1.0, 1000.0])
    rows.prediction = rows.y
    svg = analysis.scatter_svg(rows)
    assert svg.count("<circle") == analysis.POINTS and svg.count("(standard units)") == 2
    points = [point for point in ElementTree.fromstring(svg).iter() if point.tag.endswith("circle")]
    x = torch.tensor([float(point.get("cx")) for point in points])
    y = torch.tensor([float(point.get("cy")) for point in points])
    torch.testing.assert_close(x + y, torch.full((2000,), float(analysis.SIZE)), rtol=0, atol=0.11)
    assert 0 <= x.min() < x.max() <= analysis.SIZE and 40 < x.std() < 80  # of both targets
    few = make_rows(30)
    assert analysis.scatter_svg(few).count("<circle") == (~few.y.isnan()).sum() < 30
    assert "standard" not in analysis.scatter_svg(few)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.2, 0.1), (1e-9, 3e-9), (99.0, 101.5), (0.0, 9999.0)]
)
def test_ticks_are_a_few_round_numbers(low, high):
    found = analysis.ticks(low, high)
    assert 2 <= len(found) <= 11 and low - 1e-12 <= found[0] and found[-1] <= high * (1 + 1e-12)
    assert [float(f"{tick:.4g}") for tick in found] == pytest.approx(
        found, rel=1e-9, abs=0
    )  # as printed
