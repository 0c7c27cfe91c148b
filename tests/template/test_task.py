"""task.py: the plan of batches, the scale of scores, the model, and metrics for kinds of scores."""

import contextlib
import math

import pytest
import torch

from analyse_metrics import metrics_by_group
from config import Config
from errors import UserError
from metrics import mean_and_std, quality
from model import KnockoutConv, ModelConfig
from optim import OptimConfig
from task import KnockoutTask
from tests.template.fixtures import write_table
from tests.template.results import read_results
from tests.template.tables import (
    additive_tables,
    gappy_tables,
    write_binary_scores,
)
from tests.tools.runs import read_metrics


def test_a_model_of_a_different_class_has_no_plan():
    task = KnockoutTask.from_tables(additive_tables(0.1), Config())
    assert task.dataset.transform is not None
    task.check_plan(torch.nn.Linear(1, 1))
    assert task.dataset.transform is None
    assert task.route == "Linear"


def test_the_plan_is_not_used_if_an_edited_layer_does_not_fit_it(monkeypatch, caplog):
    task = KnockoutTask.from_tables(additive_tables(0.1), Config())
    add = KnockoutConv.add

    def squared(layer, x, update):
        return add(layer, x, update + update.square())

    monkeypatch.setattr(KnockoutConv, "add", squared)
    task.check_plan(task.build_model())
    assert task.dataset.transform is None and task.route == "message_passing=shared"
    assert "model_reach.py does not compute the same state changes" in caplog.text


@pytest.mark.parametrize("value", [0.0, 0.1, 123.456])
def test_constant_scores_have_the_scale_1(value):
    y = torch.full((1000,), value, dtype=torch.float64)
    assert mean_and_std(y.unsqueeze(1)) == (value, 1)


@pytest.mark.parametrize(("offset", "is_refused"), [(0.0, False), (1e7, False), (1e10, True)])
def test_a_score_whose_digits_would_be_lost_is_refused(offset, is_refused):
    tables = additive_tables(1.0)
    tables.y[:, 0] = offset + tables.y[:, 0] / tables.y[:, 0].std()
    name = tables.targets[0]
    raises = pytest.raises(UserError, match=f"deviation of '{name}' .*subtract a constant")
    with raises if is_refused else contextlib.nullcontext():
        KnockoutTask.from_tables(tables, Config())


def test_the_mean_of_binary_scores_is_a_logit_and_their_unit_is_1():
    tables = additive_tables(1.0)
    tables.y = (tables.y > tables.y.median(dim=0).values + 1).double()
    config = Config(model=ModelConfig(start="mean"), optim=OptimConfig(loss="binary"))
    criterion = KnockoutTask.from_tables(tables, config).criterion
    share = tables.y[tables.rows("train")].mean(dim=0)
    torch.testing.assert_close(criterion.mean, (share / (1 - share)).log())
    assert (criterion.std == 1).all()


@pytest.mark.parametrize("readout", ["both", "local", "global"])
def test_with_start_mean_no_rival_is_fitted_and_the_model_predicts_the_mean(readout):
    config = Config(model=ModelConfig(start="mean", readout=readout))
    tables = additive_tables(1.0)
    task = KnockoutTask.from_tables(tables, config)
    assert task.baseline is None
    assert task.rivals == {}
    model = task.build_model().eval()
    batch = task.dataset.__getitems__([0, 1, 2])
    assert "without_graph" not in model.parts(task.graph, batch)
    assert not any("baseline" in name for name in model.state_dict())
    output = task.by_score(model(task.graph, batch), batch)
    mean = tables.y[tables.rows("train")].mean(dim=0)
    prediction = task.predictions(output)["prediction"]
    torch.testing.assert_close(prediction, mean.expand(3, -1), rtol=1e-6, atol=1e-6)
    found = task.metrics("val", torch.zeros(len(task.rows("val")), tables.y.size(1), 1))
    assert list(found) == ["loss", "mse", "pearson", "n", "rows"]


# ---- Validation without scores -------------------------------------------------------------------
@pytest.mark.slow
def test_best_pt_is_chosen_by_the_scores_that_occur_in_validation(train, tmp_path):
    gappy_tables(tmp_path)
    header, *rows = (line.split("\t") for line in (tmp_path / "gaps.tsv").read_text().splitlines())
    table = [(*header[:3], "split")]
    for i, row in enumerate(rows):
        split = ("train", "train", "val", "test")[i % 4]
        table.append((row[0], "NA" if split == "val" else row[1], row[2], split))
    write_table(tmp_path / "gaps.tsv", table)
    files = ["data.edges=edges.tsv", "data.perturbations=gaps.tsv"]
    output = train(0, *files, "optim.epochs=20", "optim.lr=0.03").check().stdout
    assert "note      no val row has a value of score fitness, so " in output
    results = read_metrics(tmp_path / "runs/default", "val")
    assert all(math.isfinite(row["loss"]) for row in results)
    best = torch.load(tmp_path / "runs/default/checkpoints/best.pt", weights_only=True)
    assert best["step"] == max(results, key=quality)["step"] > 0


# ---- Binary scores -------------------------------------------------------------------------------
@pytest.mark.slow
def test_scores_of_0_and_1_are_fitted_as_probabilities(train, predict, tmp_path):
    write_binary_scores(tmp_path)
    note = "note      all scores are 0 or 1, "
    assert note in train(0).check().stdout
    options = ["optim.loss=binary", "run.name=binary", "optim.epochs=10", "model.dropout=0"]
    train(0, *options).check()
    val = read_metrics(tmp_path / "runs/binary", "val")
    (test,) = read_metrics(tmp_path / "runs/binary", "test")
    assert val[0]["pearson"] > 0.8  # training starts from the ranking of the baseline
    steps = read_metrics(tmp_path / "runs/binary", "train")
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    result = metrics_by_group(read_results(tmp_path / "runs/binary/test.tsv"), "binary")
    assert result["pearson"] == pytest.approx(test["pearson"], rel=1e-4)
    assert result["auroc"] > 0.95
    predict(0, "scores.tsv", "runs/binary").check()
    lines = (tmp_path / "scores.predictions.tsv").read_text().splitlines()[1:]
    values = [float(line.split("\t")[1]) for line in lines]
    assert 0 <= min(values) < 0.2
    assert 0.8 < max(values) <= 1


def test_loss_binary_requires_scores_of_0_and_1(train):
    wrong = train(0, "optim.loss=binary")
    assert wrong.returncode == 2
    assert "optim.loss=binary needs scores of 0 and 1" in wrong.stderr
