"""Tables with several scores, missing scores and weights: reading, metrics, baseline, training."""

import math

import pytest
import torch

from analyse_metrics import r2
from baseline import PENALTIES, TARGETS_AT_ONCE, additive_baseline
from config import Config
from data import DataConfig, KnockoutDataset, load
from data_tables import Tables
from errors import DataError, UserError
from metrics import pearson
from task import KnockoutTask
from tests.template.fixtures import write_table
from tests.template.results import read_results
from tests.template.tables import (
    EDGES,
    additive_tables,
    dense_design,
    gappy_tables,
    summary_of,
    without_validation,
    write_tables,
)
from tests.tools.runs import difference, read_metrics

HEADER = ("genes", "growth", "cell size", "split", "sd")
ROWS = [
    ("a,b", 0.5, "NA", "train", 0.5),
    ("c", "", 7, "val", 1),
    ("", 1.5, -2, "test", 2),
    ("a", "NA", "", "train", 1),
]


def test_scores_gaps_and_weights_are_read(tmp_path):
    tables = load(write_tables(tmp_path, EDGES, [HEADER, *ROWS]))
    assert list(tables.targets) == ["growth", "cell size"]
    expected = [[0.5, math.nan], [math.nan, 7], [1.5, -2], [math.nan, math.nan]]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(tables.y, expected, equal_nan=True)
    assert tables.weight.tolist() == [4, 1, 0.25, 1]
    assert tables.split.tolist() == [0, 1, 2, 0]
    assert "; 2 scores: growth, cell size; " in summary_of(tables)
    assert "4 distinct sets of 0 to 2 nodes" in summary_of(tables)
    rows = [(*row[:4], row[4] ** -2) for row in ROWS]
    weighted = load(write_tables(tmp_path, EDGES, [(*HEADER[:4], "weight"), *rows]))
    assert torch.equal(weighted.weight, tables.weight)
    assert weighted.fingerprint() == tables.fingerprint()
    assert weighted.sd is None
    assert tables.sd.tolist() == [0.5, 1, 2, 1]

    batch = KnockoutDataset(tables, torch.zeros(3).long()).__getitems__([0, -1, 2, 3])
    assert batch.y.tolist() == [[0.5, 0], [0, 0], [1.5, -2], [0, 0]]
    torch.testing.assert_close(batch.weight, torch.tensor([[4, 0], [0, 0], [0.25, 0.25], [0, 0]]))


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (HEADER, ("a", 1, "x", "val", 1), "scores.tsv:6: the cell size 'x' is not a number"),
        (HEADER, ("a", "-inf", 1, "val", 1), "scores.tsv:6: the growth '-inf' is not a number"),
        (HEADER, ("a", 1, 1, "val", -1), "scores.tsv:6: the sd '-1' is not a number from 1e-30"),
        (HEADER, ("a", 1, 1, "val", 0), "scores.tsv:6: the sd '0' is not a number from 1e-30"),
        (HEADER, ("a", 1, 1, "val", "NA"), "scores.tsv:6: the sd 'NA' is not a number from 1e-30"),
        (HEADER, ("a", 1, 1, "", 1), "scores.tsv:6: the split '' is not train, val or test"),
        ((*HEADER[:4], "weight"), ("a", 1, 1, "val", "inf"), "scores.tsv:6: the weight 'inf' is"),
        (
            ("genes", "s", "weight", "sd"),
            ("a", 1, 1, 1),
            "tsv:1: .* cannot have both weight and sd",
        ),
        (("genes", "split", "weight"), ("a", "val", 1), "tsv:1: .* at least one score column"),
    ],
)
def test_errors_in_a_table_contain_line_and_column(tmp_path, header, row, message):
    rows = [(*row[:4], 1) for row in ROWS] if header[1:4] == HEADER[1:4] else []
    with pytest.raises(DataError, match=message):
        load(write_tables(tmp_path, EDGES, [header, *rows, row]))


# ---- Metrics -------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0.1, 0.7, 1e20])
@pytest.mark.parametrize("n", [3, 7, 10, 49])
def test_pearson_is_0_for_a_constant_prediction_and_nan_for_constant_scores(n, value):
    constant = torch.full((n, 1), value, dtype=torch.float64)
    varies = torch.arange(float(n), dtype=torch.float64).unsqueeze(1)
    assert pearson(varies, constant) == 0
    assert pearson(constant, varies).isnan()
    assert pearson(constant, constant).isnan()
    # A mean over targets leaves out targets with constant scores, but includes targets with a
    # constant prediction.
    y = torch.cat([varies, varies, constant], dim=1)
    r = pearson(y, torch.cat([2 * varies, constant, varies], dim=1))
    torch.testing.assert_close(r, torch.tensor([1.0, 0.0, math.nan]).double(), equal_nan=True)


# ---- Validation without scores -------------------------------------------------------------------
def penalty_of(tables: Tables, prediction: torch.Tensor, t: int) -> float:
    """Returns the penalty with which a dense ridge on all training rows gives this prediction.

    `t` is the number of the score.
    """
    x = dense_design(tables)
    train = tables.rows("train")
    train = train[~tables.y[train, t].isnan()]
    found = []
    for penalty in PENALTIES:
        penalties = torch.tensor([0.0, 0.0] + [penalty] * len(tables.genes)).double().diag()
        solution = torch.linalg.solve(
            x[train].T @ x[train] + penalties, x[train].T @ tables.y[train, t]
        )
        if (x @ solution - prediction[:, t]).abs().max() < 1e-5:
            found.append(penalty)
    (penalty,) = found
    return penalty


@pytest.mark.parametrize(("num_scores", "names"), [(1, "score0"), (2, "score0, score1")])
def test_validation_without_any_score_is_an_error(tmp_path, num_scores, names):
    tables = without_validation(additive_tables(0.1, num_scores), *range(num_scores))
    with pytest.raises(UserError, match=f"no val row has a value of score {names}: remove"):
        KnockoutTask.from_tables(tables, Config(data=DataConfig(cache_dir=str(tmp_path))))


@pytest.mark.parametrize("noise", [0.1, 1.0, 4.0])
def test_the_penalty_of_a_score_without_validation_scores_is_from_training_rows(
    tmp_path, caplog, noise
):
    """The penalty is close to the penalty that validation scores would choose.

    The final fit uses all training rows.
    """
    tables = additive_tables(noise, num_rows=2000)
    expected = penalty_of(tables, additive_baseline(tables).prediction, 1)
    gappy = without_validation(tables, 1)
    options = DataConfig(cache_dir=str(tmp_path))
    task = KnockoutTask.from_tables(gappy, Config(data=options))
    prediction = task.rivals["baseline"]
    assert "note      no val row has a value of score score1, so " in caplog.text
    found = penalty_of(gappy, prediction, 1)
    assert expected / 11 < found < 11 * expected
    assert found < 1000
    complete = additive_baseline(tables).prediction
    torch.testing.assert_close(prediction[:, :1], complete[:, :1], rtol=0, atol=1e-6)
    if noise == 0.1:
        test = tables.rows("test")
        assert r2(tables.y[test], prediction[test]).min() > 0.97


def test_scores_with_and_without_validation_scores_are_fitted_together():
    """There are so many scores that one block of scores has no validation scores at all."""
    tables = without_validation(additive_tables(0.3, TARGETS_AT_ONCE + 2), *range(TARGETS_AT_ONCE))
    prediction = additive_baseline(tables).prediction
    test = tables.rows("test")
    assert r2(tables.y[test], prediction[test]).min() > 0.8
    assert max(penalty_of(tables, prediction, t) for t in range(0, 66, 13)) < 10


@pytest.mark.parametrize(("noise", "least", "most"), [(0.1, 0.1, 1.0), (8.0, 10.0, 316.3)])
def test_the_rows_that_choose_a_penalty_are_from_sets_with_the_score(noise, least, most):
    """Only every third row has the score, as if a table listed A, then B, then A,B."""
    tables = additive_tables(noise, num_rows=900)
    tables.y[torch.arange(900) % 3 != 2, 1] = math.nan
    gappy = without_validation(tables, 1)
    prediction = additive_baseline(gappy).prediction
    assert least <= penalty_of(gappy, prediction, 1) <= most


# ---- Training ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_gaps_do_not_break_parity_and_each_target_is_predicted(train, predict, tmp_path):
    """The rows of a step are not a multiple of the number of ranks or micro-batches."""
    tables = gappy_tables(tmp_path)
    settings = [*tables, "data.batch_size=32", "optim.precision=fp64", "optim.epochs=2"]
    train(0, *settings, "run.name=0").check()
    train(3, *settings, "run.name=3", "optim.accumulate=2").check()
    assert difference(tmp_path / "runs/3", tmp_path / "runs/0", 1e-9) == ""
    (test,) = read_metrics(tmp_path / "runs/0", "test")
    assert test["pearson"] > 0.5
    expected, found = (read_results(tmp_path / f"runs/{name}/test.tsv") for name in ("0", "3"))
    assert found.genes == expected.genes
    torch.testing.assert_close(found.y, expected.y, equal_nan=True)
    torch.testing.assert_close(found.prediction, expected.prediction, rtol=1e-9, atol=1e-9)

    (tmp_path / "ask.tsv").write_text("genes\nY03,Y07\nnobody\n\n")
    predict(2, "ask.tsv", "runs/0").check()
    header, pair, unknown, intact = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    assert header == "genes\tfitness\tsize"
    assert unknown == "nobody\t\t"
    assert [len(line.split("\t")) for line in (pair, intact)] == [3, 3]
    assert intact.startswith("\t")
    assert 500 < float(pair.split("\t")[2]) < 1500


def test_a_score_that_no_training_row_has_is_an_error(train, tmp_path):
    gappy_tables(tmp_path)
    _, *rows = (line.split("\t") for line in (tmp_path / "gaps.tsv").read_text().splitlines())
    parts = ["train", "val", "test"]
    table = [(*row[:2], "NA" if i % 3 == 0 else "1", parts[i % 3]) for i, row in enumerate(rows)]
    write_table(tmp_path / "gaps.tsv", [("genes", "fitness", "size", "split"), *table])
    result = train(0, "data.perturbations=gaps.tsv")
    assert result.returncode == 2
    assert result.stderr.count("error: no train row has a value of score size: remove") == 1
