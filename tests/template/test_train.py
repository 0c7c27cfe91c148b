"""train.py as users run it: its output, the training loop, the loss, resuming and the meter."""

import math
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import Config
from data_loader import make_loader
from ddp_setup import DDPConfig, Distributed
from errors import RunError
from metrics import first_metric
from optim import OptimConfig
from run_checkpoint import TrainState
from tests.template.fixtures import write_table
from tests.tools.runs import difference, read_metrics, series
from train import MAX_SKIPS, Meter, seed_step


# ---- Output --------------------------------------------------------------------------------------
def test_a_run_prints_its_plan_and_progress(train):
    result = train(0).check()
    lines = result.stdout.splitlines()
    made = [re.match(r"cache     writing \.cache/(\w+)-", line)[1] for line in lines[:4]]
    assert made == ["tables", "split", "baseline", "pairs"]
    rank = r"rank 0, host .*, pid \d+, device cpu, threads 1 \(OMP_NUM_THREADS\), python .*"
    assert re.fullmatch(rank, lines[4])
    kinds = [line.split()[0] for line in lines[5:]]
    assert kinds == [
        *("run", "data", "model", "batch"),
        *("epoch", "epoch", "trained", "run", "test"),
    ]
    validation = f"val loss .*, {first_metric().title()} .*"
    assert re.fullmatch(f"epoch 0/1  step 0  {validation}", lines[9])
    progress = r"loss [\d.]+  [\d,]+ samples/s"
    assert re.fullmatch(f"epoch 1/1  step 5  {progress}  {validation}", lines[10])
    assert result.stderr == ""  # outside a terminal, the progress bar first appears after 30 s


@pytest.mark.slow
def test_rank_0_shows_its_progress_and_the_second_rank_prints_nothing(train, tmp_path):
    train(2, fault="terminal").check()
    assert "epoch 1/1" in (tmp_path / "rank0.stderr").read_text()
    assert (tmp_path / "rank1.stderr").read_text() == ""
    assert (tmp_path / "rank1.stdout").read_text() == ""
    assert "test      loss" in (tmp_path / "rank0.stdout").read_text()
    assert "test      loss" in (tmp_path / "runs/default/log.rank1.txt").read_text()


def test_a_step_has_the_same_seed_on_all_ranks_but_torch_is_seeded_differently():
    seeds, drawn = zip(*((seed_on(rank), torch.rand(())) for rank in range(2)), strict=True)
    assert seeds[0] == seeds[1] and drawn[0] != drawn[1]


def seed_on(rank: int) -> torch.Tensor:
    return seed_step(7, 3, SimpleNamespace(rank=rank, device="cpu"))


# ---- The loop ------------------------------------------------------------------------------------
def test_a_run_never_ends_below_the_additive_baseline(train, tmp_path):
    """The first predictions are those of the baseline, and best.pt can be this first model.

    With this high learning rate, all later models are worse.
    """
    train(0, "optim.lr=1", "optim.epochs=2", "optim.clip=0", "model.dropout=0").check()
    val = read_metrics(tmp_path / "runs/default", "val")
    (test,) = read_metrics(tmp_path / "runs/default", "test")
    assert val[0]["pearson"] == pytest.approx(val[0]["baseline_pearson"], abs=1e-6)
    best = max(val, key=lambda row: row[first_metric()])
    assert test["best_step"] == best["step"] == 0
    assert test["pearson"] == pytest.approx(test["baseline_pearson"], abs=1e-6)


def test_a_run_that_starts_from_the_mean_does_not_mention_a_baseline(train, tmp_path):
    result = train(0, "model.start=mean", "optim.lr=0").check()
    assert "model of step 0: validation never improved" in result.stdout
    assert "baseline" not in result.stdout + result.stderr
    for file in (tmp_path / "runs/default").iterdir():
        if file.is_file() and file.suffix != ".pt":
            assert "baseline" not in file.read_text(), file


def test_training_ends_when_patience_runs_out(train, tmp_path):
    options = ["optim.lr=0", "optim.patience=2", "optim.epochs=9"]
    first = train(0, *options).check().stdout
    assert "model of step 0: validation never improved" in first
    assert "trained   2 epochs: increase optim.patience to train further" in first
    assert [row["epoch"] for row in read_metrics(tmp_path / "runs/default", "val")] == [0, 1, 2]
    assert "resumed at step 10" in train(0, *options).check().stdout
    assert [row["epoch"] for row in read_metrics(tmp_path / "runs/default", "val")] == [0, 1, 2]


def test_the_sampler_gets_the_seed_of_the_run(train, monkeypatch):
    samplers = []

    def kept(dataset: Any, sampler: Any, *others: Any) -> Any:
        samplers.append(sampler)
        return make_loader(dataset, sampler, *others)

    monkeypatch.setattr("train.make_loader", kept)
    train(0, "run.seed=7").check()
    assert samplers[0].seed == 7


@pytest.mark.slow
def test_deterministic_algorithms_are_used_on_request(train):
    report = "print_determinism"
    output = train(0, "run.deterministic=true", fault=report).check().stdout
    assert "deterministic True :4096:8" in output
    assert "put_ does not have a deterministic implementation" in output
    other = train(0, "run.name=other", fault=report, CUBLAS_WORKSPACE_CONFIG=":16:8").check()
    assert "deterministic False :16:8" in other.stdout


@pytest.mark.slow
def test_metrics_count_the_rows_with_a_score(train, tmp_path):
    """A third of the rows does not have a score."""
    rows = [("genes", "score", "split")]
    for number, line in enumerate((tmp_path / "scores.tsv").read_text().splitlines()[1:]):
        genes, y = line.split("\t")
        split = ("train", "train", "val", "test")[number // 3 % 4]
        rows.append((genes, "NA" if number % 3 == 0 else y, split))
    write_table(tmp_path / "some.tsv", rows)
    result = train(0, "data.perturbations=some.tsv").check()
    (test,) = read_metrics(tmp_path / "runs/default", "test")
    scored = [row for row in rows if row[2] == "test" and row[1] != "NA"]
    assert (test["n"], test["rows"]) == (len(scored), 48) and len(scored) == 32
    assert "(32 samples)\n" in result.stdout


# ---- Stopping and resuming -----------------------------------------------------------------------
@pytest.mark.parametrize("nproc", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_one_that_was_never_stopped(train, tmp_path, nproc):
    """Imitates a run that was killed in the middle of an epoch.

    The later checkpoints are missing, and metrics.jsonl ends with an incomplete row.
    """
    settings = ["optim.epochs=2", "checkpoint.every_steps=3", "checkpoint.keep_last=9"]
    settings.append("model.dropout=0.2")
    train(nproc, *settings, "run.name=whole").check()
    whole = tmp_path / "runs/whole"
    cut = tmp_path / "runs/cut"
    shutil.copytree(whole, cut)
    for name in ("best", "step_00000005", "step_00000006", "step_00000009", "step_00000010"):
        (cut / f"checkpoints/{name}.pt").unlink()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    again = train(nproc, *settings, "run.name=cut").check()
    assert "resumed at step 3" in again.stdout
    assert series(cut) == series(whole)
    assert (cut / "test.tsv").read_text() == (whole / "test.tsv").read_text()
    events = [row["event"] for row in read_metrics(cut, "event")]
    assert events == ["started", "finished", "resumed", "finished"]
    expected, found = (
        torch.load(folder / "checkpoints/step_00000010.pt", weights_only=True)
        for folder in (whole, cut)
    )
    assert_same_models(found, expected)


def assert_same_models(found: dict, expected: dict) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for name, value in expected["model"].items():
        assert torch.equal(value, found["model"][name]), name


def test_a_run_stopped_at_the_end_of_an_epoch_validates_it_on_resume(train, tmp_path):
    """The run is stopped after the last step of the epoch, and before its validation."""
    arguments = ["optim.epochs=2", "log.every_steps=3"]
    stopped = train(0, *arguments, fault="stop_at_step:4").check()
    assert "stopped   at step 5" in stopped.stdout
    train(0, *arguments).check()
    train(0, *arguments, "run.name=whole").check()
    run = tmp_path / "runs/default"
    assert series(run) == series(tmp_path / "runs/whole")
    events = [row["event"] for row in read_metrics(run, "event")]
    assert events == ["started", "stopped", "resumed", "finished"]


def test_a_stop_between_two_train_rows_writes_an_extra_one(train, tmp_path):
    train(0, "log.every_steps=4", fault="stop_at_step:1").check()
    train(0, "log.every_steps=4").check()
    train(0, "run.name=whole").check()
    rows = read_metrics(tmp_path / "runs/default", "train")
    assert [row["step"] for row in rows] == [2, 4, 5]
    loss = [row["loss"] for row in read_metrics(tmp_path / "runs/whole", "train")]
    # All steps except the last have the same number of samples.
    expected = [sum(loss[:2]) / 2, sum(loss[2:4]) / 2, loss[4]]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-6)


def test_a_run_stopped_between_an_epoch_and_its_validation_resumes_with_the_validation(
    train, tmp_path
):
    options = ["optim.lr=0.05", "optim.epochs=4", "optim.patience=1"]
    train(0, *options, "run.name=whole").check()
    stopped = train(0, *options, fault="stop_in_evaluation:2").check()
    assert "stopped   at step 5" in stopped.stdout
    assert "resumed at step 5" in train(0, *options).check().stdout
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole") == ""


@pytest.mark.slow
def test_a_stop_in_the_test_evaluation_leaves_the_last_checkpoint_unchanged(train, tmp_path):
    """At that time, the model has the parameters of the best epoch, here the second of three.

    They must not be saved in the checkpoint of the last step.
    """
    arguments = ["optim.lr=0.1", "optim.epochs=3", "model.dropout=0", "model.pairs=false"]
    output = train(0, *arguments, fault="stop_in_evaluation:5").check().stdout
    assert "stopped   at step 15" in output
    train(0, *arguments, "run.name=whole").check()
    stopped, whole = (
        torch.load(tmp_path / f"runs/{name}/checkpoints/step_00000015.pt", weights_only=True)
        for name in ("default", "whole")
    )
    assert whole["best"]["step"] == 10
    assert_same_models(stopped, whole)


# ---- The meter -----------------------------------------------------------------------------------
@pytest.fixture
def meter() -> Meter:
    """A meter for two scores."""
    return new_meter()


def new_meter(on_nonfinite: str = "skip") -> Meter:
    config = Config(optim=OptimConfig(on_nonfinite=on_nonfinite))
    task = SimpleNamespace(num_targets=2, config=config)
    return Meter(task, Distributed(DDPConfig()))


def test_skipped_steps_are_counted_but_fp16_overflows_are_not():
    good = 1.0
    bad = math.nan
    state = TrainState(None, None, None)

    def take(*norms: float, scale: float = 1.0, loss: float = 0.5) -> dict:
        meter = new_meter()
        for norm in norms:
            state.step += 1
            meter.add_loss(torch.tensor([loss, 0.0]))
            meter.count(1, torch.ones(2), torch.tensor([norm, scale]))
        return meter.read(state)

    assert take(good, bad, scale=2.0)["skipped"] == 0  # an overflow at a scale of 2
    assert take(bad, good, *[bad] * (MAX_SKIPS - 1))["skipped"] == MAX_SKIPS
    message = rf"step {state.step + 1} is not finite.* {MAX_SKIPS} such steps in a row"
    with pytest.raises(RunError, match=message):
        take(bad)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_non_finite_loss_is_not_an_overflow_at_any_scale(meter, loss):
    state = TrainState(None, None, None, step=3)
    for loss_of_step, norm in ((0.5, 0.5), (loss, loss), (0.5, math.nan)):
        meter.add_loss(torch.tensor([loss_of_step, 0.0]))
        meter.count(1, torch.ones(2), torch.tensor([norm, 65536.0]))
    assert meter.read(state)["skipped"] == 1
    meter = new_meter("stop")
    meter.add_loss(torch.tensor([loss, 0.0]))
    meter.count(1, torch.ones(2), torch.tensor([math.nan, 65536.0]))
    state.step = 4
    with pytest.raises(RunError, match=r"step 4 is not finite.* 1 such step:"):
        meter.read(state)


def test_a_row_has_the_mean_loss_and_times_since_the_previous_row(meter, monkeypatch):
    state = TrainState(None, None, None)
    for total, num_samples in ((3.0, 2), (1.0, 2), (2.0, 1)):
        meter.add_loss(torch.tensor([total, 0.1]))
        meter.count(num_samples, torch.tensor([num_samples, 0.2]), torch.ones(2))
    meter.ddp.seconds["data"] = 1.5
    monkeypatch.setattr("train.time", SimpleNamespace(perf_counter=lambda: meter.start + 4.5))
    row = meter.read(state)
    assert row["loss"] == pytest.approx((6.0 / 5 + 0.3 / 0.6) / 2)  # the mean of two scores
    times = {name: row[name] for name in ("samples_per_s", "data_ms", "step_ms")}
    assert times == pytest.approx({"samples_per_s": 1.1, "data_ms": 500.0, "step_ms": 1500.0})


def test_the_times_of_a_row_include_the_wait_for_the_device(meter, monkeypatch):
    """The host only launches kernels, so it can finish its steps long before the device does."""
    seconds = 1.0

    def wait(values):
        nonlocal seconds
        seconds = 3.0
        return values

    monkeypatch.setattr(meter.ddp, "sum", wait)
    monkeypatch.setattr("train.time", SimpleNamespace(perf_counter=lambda: meter.start + seconds))
    meter.add_loss(torch.zeros(2))
    meter.count(6, torch.ones(2), torch.ones(2))
    row = meter.read(TrainState(None, None, None))
    assert (row["samples_per_s"], row["step_ms"]) == (2.0, 3000.0)


def test_the_memory_of_a_row_is_all_memory_reserved_on_the_gpu(meter, monkeypatch):
    """The memory that replays of CUDA graphs need does not count as allocated."""
    meter.add_loss(torch.zeros(2))
    meter.count(1, torch.ones(2), torch.ones(2))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**30)
    meter.ddp = SimpleNamespace(
        device=torch.device("cuda"), sum=lambda values: values, seconds={"data": 0.0}
    )
    assert meter.read(TrainState(None, None, None))["memory_mb"] == 3072


def test_the_loss_of_a_row_ignores_scores_without_a_value(meter):
    meter.add_loss(torch.tensor([3.0, 0.0]))
    meter.count(2, torch.tensor([2.0, 0.0]), torch.ones(2))
    assert meter.read(TrainState(None, None, None))["loss"] == 1.5


def test_ranks_only_agree_at_once_in_each_validation_and_in_the_test(train, monkeypatch):
    """After the last step of an epoch, they do not, because its validation follows."""
    asked = []
    stop_reason = Distributed.stop_reason

    def counted(ddp: Distributed, at_once: bool = True) -> str:
        asked.append(at_once)
        return stop_reason(ddp, at_once)

    monkeypatch.setattr(Distributed, "stop_reason", counted)
    train(0, "optim.epochs=3").check()
    assert sum(asked) == 1 + 3 + 1  # at the start, after each epoch, and in the test


def test_metrics_have_the_learning_rate_of_the_optimiser(train, tmp_path, monkeypatch):
    """The loop of a copy may set the learning rate in a different way."""

    def set_constant(optimizer: torch.optim.Optimizer, factor: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.125

    monkeypatch.setattr("train.set_learning_rates", set_constant)
    train(0, "log.every_steps=1").check()
    rows = read_metrics(tmp_path / "runs/default", "train")
    assert [row["lr"] for row in rows] == [0.125] * len(rows)
