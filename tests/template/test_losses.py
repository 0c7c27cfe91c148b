"""losses.py: the losses, the columns of the output, predictions for metrics, and errors."""

import math
from dataclasses import replace

import pytest
import torch

from config import Config
from data import DataConfig
from errors import UserError
from losses import LOSSES, Criterion
from metrics import METRICS, metrics_text
from model import ModelConfig
from optim import OptimConfig
from task import KnockoutTask
from tests.template.results import log_likelihood
from tests.template.tables import additive_tables


class Gaussian(Criterion):
    """The negative logarithm of a normal density, whose mean and log variance are predicted."""

    columns = ("mean", "log_variance")

    def losses(self, output, y):
        mean, log_variance = output.unbind(-1)
        error = self.standardise(y, mean.dtype) - mean
        return (log_variance + error.square() / log_variance.exp()) / 2

    def predictions(self, output):
        sd = self.std * (output.select(-1, 1) / 2).exp()
        return {**super().predictions(output), "sd": sd}


@pytest.fixture(autouse=True)
def _more_losses(monkeypatch):
    monkeypatch.setitem(LOSSES, "gaussian", Gaussian)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder in which the baselines of all tasks are cached."""
    return tmp_path_factory.mktemp("cache")


def random_numbers(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def make_task(loss, folder, readout="both"):
    """Returns a task with two scores, of which some are missing, and weights."""
    tables = additive_tables(1.0)
    tables.weight = 1.0 + torch.arange(len(tables.y)) % 6
    if LOSSES[loss].is_binary:
        tables.y = (tables.y > tables.y.median(dim=0).values).double()
    tables.y[::3, 0] = math.nan
    config = Config(
        data=DataConfig(cache_dir=str(folder)),
        model=ModelConfig(hidden=4, readout=readout),
        optim=OptimConfig(loss=loss),
    )
    return KnockoutTask.from_tables(tables, config)


# ---- Losses --------------------------------------------------------------------------------------
def test_an_ensemble_predicts_the_sd_of_the_mixture_of_its_models():
    predictions = {
        "prediction": torch.tensor([[[1.0]], [[5.0]]]).double(),  # two models, [M, n, T]
        "sd": torch.tensor([[[1.0]], [[3.0]]]).double(),
    }
    together = Gaussian.together(predictions)
    assert together["prediction"].item() == 3
    assert together["sd"].item() == pytest.approx(math.sqrt((1 + 9) / 2 + 4))


@pytest.mark.parametrize("loss", ["binary", "gaussian"])
def test_validation_and_training_report_the_same_loss_of_the_same_rows(loss, folder):
    task = make_task(loss, folder)
    for split in ("train", "val"):
        rows = task.rows(split)
        output = random_numbers(len(rows), task.num_outputs)
        total = torch.zeros(2, dtype=torch.float64)
        for some in torch.arange(len(rows)).split(7):
            total += task.loss(output[some], task.dataset.__getitems__(rows[some].tolist()))
        in_training = (total / task.dataset.total_weight(rows)).mean().item()
        of_split = output.view(len(rows), 2, -1)
        assert task.metrics(split, of_split)["loss"] == pytest.approx(in_training, rel=1e-6)


@pytest.mark.parametrize(("readout", "from_mean"), [("both", False), ("global", True)])
def test_the_log_reports_if_training_starts_from_the_mean_despite_a_baseline(
    readout, from_mean, folder
):
    task = make_task("squared", folder, readout)
    batch = task.dataset.__getitems__([0, 1, 2])
    output = task.build_model().eval()(task.graph, batch)
    assert bool((output == 0).all()) is from_mean
    notes = [note for note in task.notes() if "starts from the mean" in note]
    assert len(notes) == from_mean
    assert task.rivals["baseline"].std() > 0
    losses = task.criterion.losses(task.by_score(output, batch), batch.y)
    assert losses.dtype == output.dtype == torch.float32


# ---- Columns -------------------------------------------------------------------------------------
def test_the_baseline_is_only_in_the_first_column_of_each_score(folder):
    squared = make_task("squared", folder)
    task = make_task("gaussian", folder)
    batch = task.dataset.__getitems__([0, 1, 2])
    outputs = []
    for each in (squared, task):
        torch.manual_seed(0)
        model = each.build_model().eval()
        parts = model.parts(each.graph, batch)
        output = model(each.graph, batch)
        torch.testing.assert_close(sum(parts.values()), output)
        outputs.append(each.by_score(output, batch))
    means, others = outputs[1].unbind(-1)
    assert torch.equal(means, outputs[0].squeeze(-1)) and means.all()
    assert not others.any()
    assert task.output_names() == [
        f"score{t} {column}" for t in (0, 1) for column in ("mean", "log_variance")
    ]


def test_every_column_is_trained(folder):
    task = make_task("gaussian", folder)
    model = task.build_model()
    batch = task.dataset.__getitems__(task.rows("train")[:8].tolist())
    batch.seed = torch.tensor(0)
    task.loss(model(task.graph, batch), batch).sum().backward()
    for readout in (model.terms["local"], model.terms["knockout"]):
        assert readout.head[-1].bias.grad.shape == (4,)
        assert readout.head[-1].bias.grad.all()


def test_a_metric_can_use_further_predictions_of_the_loss(folder, monkeypatch, caplog):
    """The metric is omitted for rivals, and with a warning for a loss without these predictions."""
    monkeypatch.setitem(METRICS, "log_likelihood", log_likelihood)
    task = make_task("gaussian", folder)
    output = random_numbers(len(task.rows("test")), 2, 2)
    found = task.metrics("test", output)
    assert "baseline_pearson" in found and "baseline_log_likelihood" not in found
    assert metrics_text(found, ["baseline"]).endswith(
        f", Log Likelihood {found['log_likelihood']:.4f}"
    )
    header = next(iter(task.result_lines(output)))
    assert "score1\tscore1_prediction\tscore1_prediction_sd\tscore1_baseline" in header
    assert "log_likelihood" not in caplog.text
    task = make_task("squared", folder)
    problem = "the metric log_likelihood needs sd, which optim.loss=squared does not predict"
    assert f"{problem}, so it is omitted" in caplog.text
    assert "log_likelihood" not in task.metrics("test", output[:, :, :1])
    monkeypatch.delitem(METRICS, "pearson")
    with pytest.raises(UserError, match=f"{problem}: set another loss"):
        make_task("squared", folder)


# ---- Errors --------------------------------------------------------------------------------------
def test_readout_nodes_has_one_column(folder):
    task = make_task("gaussian", folder)
    task = replace(task, config=replace(task.config, model=ModelConfig(readout="nodes")))
    problem = "optim.loss=gaussian needs several outputs for each score"
    with pytest.raises(UserError, match=problem):
        task.build_model()


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_model_with_a_wrong_output_shape_is_an_error_without_traceback(train, nproc):
    result = train(nproc, fault="other_shape")
    assert result.returncode == 1
    assert result.stderr.count("error: ") == 1, result.stderr
    assert "the model returned [" in result.stderr
    assert "Traceback" not in result.stderr


class Misshapen(Gaussian):
    """Predicts one `sd` for all scores of a row."""

    def predictions(self, output):
        predictions = super().predictions(output)
        return predictions | {"sd": predictions["sd"].mean(dim=1, keepdim=True)}


class Misordered(Gaussian):
    """Predicts the `sd` first."""

    def predictions(self, output):
        return dict(reversed(super().predictions(output).items()))


@pytest.mark.parametrize("loss", [Misshapen, Misordered])
def test_predictions_of_a_loss_have_the_shape_of_the_scores_and_begin_with_prediction(
    folder, monkeypatch, loss
):
    monkeypatch.setitem(LOSSES, "own", loss)
    with pytest.raises(UserError, match=r"optim\.loss=own: "):
        make_task("own", folder)
