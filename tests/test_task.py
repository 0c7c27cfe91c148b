"""The task: its scale, its model, and its metrics, of scores of any kind."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analyse import analyse
from config import Config
from optim import OptimConfig
from results import read_predictions
from tables import Tables, mean_and_std
from task import KnockoutTask
from tests.conftest import write_table
from tests.tools.runs import pack_sets, read_metrics, tables_of

BINARY = Config(optim=OptimConfig(loss="binary"))


@pytest.mark.parametrize("value", [0.0, 0.1, 123.456])
def test_constant_scores_have_the_scale_1(value):
    y = torch.full((1000,), value, dtype=torch.float64)
    assert mean_and_std(y.unsqueeze(1)) == (value, 1)


def test_the_metrics_of_a_split_equal_their_definitions():
    generator = torch.Generator().manual_seed(0)
    y, prediction, baseline = torch.randint(-4, 5, (3, 60, 1), generator=generator).double()
    rows = torch.arange(10, 60)
    task = SimpleNamespace(
        config=Config(),
        tables=tables_of([[]] * 60, y),
        baseline=SimpleNamespace(prediction=baseline, std=mean_and_std(y)[1]),
        rows={"test": rows}.get,
    )
    found = KnockoutTask.metrics(task, "test", prediction[rows])
    variance = y.numpy().var()
    y_of_rows, x, x_of_baseline = (values[rows, 0].numpy() for values in (y, prediction, baseline))
    assert found["n"] == found["rows"] == 50
    assert found["pearson"] == pytest.approx(np.corrcoef(y_of_rows, x)[0, 1])
    assert found["baseline_pearson"] == pytest.approx(np.corrcoef(y_of_rows, x_of_baseline)[0, 1])
    assert found["mse"] == pytest.approx(((y_of_rows - x) ** 2).mean())
    assert found["loss"] == pytest.approx(found["mse"] / variance)

    task.config = BINARY
    task.tables.y = (y > 0).double()
    found = KnockoutTask.metrics(task, "test", prediction[rows].sigmoid())
    probability = 1 / (1 + np.exp(-x))
    of_truth = np.where(y_of_rows > 0, probability, 1 - probability)
    assert found["loss"] == pytest.approx(-np.log(of_truth).mean())


@pytest.mark.parametrize(
    ("sets", "split", "unseen"),
    [
        ([[0], [1], [0, 1], []], [0, 0, 1, 2], 0.0),
        ([[0, 1], [2], [0, 3], [1, 3, 4]], [0, 2, 1, 1], 0.6),
    ],
)
def test_training_hides_as_many_nodes_as_are_unseen_in_validation(sets, split, unseen):
    perturbed, pointer = pack_sets(sets)
    tables = Tables(
        genes=["a", "b", "c", "d", "e"],
        relations=["r"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        perturbed=perturbed,
        perturbed_ptr=pointer,
        y=torch.arange(4.0).double(),
        split=torch.tensor(split, dtype=torch.int8),
    )
    model = KnockoutTask.from_tables(tables, Config()).build_model()
    assert model.unseen == pytest.approx(unseen)


# ---- Binary scores -------------------------------------------------------------------------------
def write_binary_scores(folder: Path) -> None:
    """Makes the scores of the tiny tables 1 for every row with one of five genes, else 0."""
    chosen = {"Y01", "Y02", "Y03", "Y04", "Y05"}
    rows = [("genes", "score")]
    for line in (folder / "scores.tsv").read_text().splitlines()[1:]:
        genes = line.split("\t")[0]
        rows.append((genes, int(not chosen.isdisjoint(genes.split(",")))))
    write_table(folder / "scores.tsv", rows)


def test_scores_of_0_and_1_are_fitted_as_probabilities(train, predict, tmp_path):
    write_binary_scores(tmp_path)
    note = "note      all scores are 0 or 1: optim.loss=binary predicts probabilities"
    assert note in train(0).check().stdout
    options = ["optim.loss=binary", "run.name=binary", "optim.epochs=10", "model.dropout=0"]
    train(0, *options).check()
    val = read_metrics(tmp_path / "runs/binary", "val")
    (test,) = read_metrics(tmp_path / "runs/binary", "test")
    assert val[0]["pearson"] > 0.8  # it begins with the baseline's ranking
    assert val[-1]["loss"] < 0.5 * val[0]["loss"]
    result = analyse(read_predictions(tmp_path / "runs/binary/test.tsv"), "binary")
    assert result["pearson"] == pytest.approx(test["pearson"], rel=1e-4)
    assert result["auroc"] > 0.95
    assert result["average_precision"] > 0.9
    predict(0, "scores.tsv", "runs/binary").check()
    lines = (tmp_path / "scores.predictions.tsv").read_text().splitlines()[1:]
    values = [float(line.split("\t")[1]) for line in lines]
    assert 0 <= min(values) < 0.2
    assert 0.8 < max(values) <= 1


def test_options_that_do_not_suit_the_scores(train):
    wrong = train(0, "optim.loss=binary")
    assert wrong.returncode == 2
    assert "optim.loss=binary needs scores of 0 and 1: set optim.loss=squared" in wrong.stderr
