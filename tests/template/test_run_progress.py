"""Progress bars and the remaining time: when and where they appear, and their texts."""

import errno
import io
import re
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from analyse_metrics import metrics_by_group, metrics_of_rivals
from baseline import fit_baseline
from config import Config
from data import DataConfig
from ddp_setup import DDPConfig, Distributed
from evaluate import predict_rows
from run_folder import RunFolder
from run_progress import ProgressBar, progress_bar
from task import KnockoutTask
from tests.template.results import make_rows
from tests.template.tables import additive_tables, combined_tables


class Clock:
    """A simulated clock. Each time it is read, it advances by `tick` seconds."""

    def __init__(self):
        self.now = 1000.0
        self.tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Stderr(io.StringIO):
    """A terminal or a file that records the times at which something was written."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock
        self.is_terminal = True
        self.written_at = []

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if text:
            self.written_at.append(self.clock.now)
        return super().write(text)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    monkeypatch.setattr("run_folder.time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def terminal(monkeypatch, clock) -> Stderr:
    stderr = Stderr(clock)
    monkeypatch.setattr("run_progress.sys", SimpleNamespace(stderr=stderr))
    return stderr


def work(clock: Clock, num_steps: int, seconds: float, **options) -> None:
    """Runs a loop with a bar, given the duration of a step on the simulated clock."""
    for _ in progress_bar(range(num_steps), "working", **options):
        clock.now += seconds


# ---- When a bar appears --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("num_steps", "seconds", "is_shown"), [(49, 0.1, True), (1, 100, True), (80, 0.1, False)]
)
def test_short_work_a_single_step_and_other_ranks_have_no_bar(
    clock, terminal, num_steps, seconds, is_shown
):
    work(clock, num_steps, seconds, is_shown=is_shown)
    assert terminal.getvalue() == ""


def test_long_work_has_a_bar_that_is_erased_at_the_end(clock, terminal):
    work(clock, 80, 0.1)
    texts = terminal.getvalue().split("\r")
    assert terminal.written_at[0] == pytest.approx(1005, abs=0.11)
    assert re.match(r"working:  6\d%.* 5\d/80 \[00:05<00:0[23], 10.00it/s\]", texts[1])
    assert texts[-2:] == [" " * len(texts[-2]), ""]


def test_the_bar_of_an_epoch_appears_at_once(clock, terminal):
    for _ in progress_bar(range(2), "epoch 1/10", delay=0):
        assert "epoch 1/10:   0%" in terminal.getvalue()


def test_a_file_gets_no_bar(clock, terminal):
    terminal.is_terminal = False
    work(clock, 100, 10, delay=0)
    assert terminal.getvalue() == ""


def test_a_closed_terminal_does_not_end_a_run(clock, terminal):
    """For example, with nohup. tqdm itself ignores this error."""

    def write(text):
        if text:
            raise OSError(errno.EIO, "Input/output error")

    terminal.write = write
    work(clock, 80, 0.1)


def test_other_bars_of_tqdm_in_this_process_are_not_changed():
    assert ProgressBar.monitor_interval == 0 and tqdm.monitor_interval > 0
    assert tqdm.get_lock() is not ProgressBar.get_lock()


# ---- Texts ---------------------------------------------------------------------------------------
def test_the_remaining_time_is_based_on_steps_and_validations_of_this_process(clock):
    """The run is resumed after its tenth step."""
    folder = RunFolder(Config(), Distributed(DDPConfig()), origin=None)
    folder.first_step, folder.last_step = 10, 40
    assert folder.progress(10) == ""
    folder.started_at = clock.now
    folder.loss_and_speed = "loss 1"
    for step, left in ((20, "run: 03:20 left  "), (30, "run: 01:40 left  "), (40, "")):
        clock.now += 10 * 9 + 10  # ten steps of 9 s, and a validation of 10 s
        assert folder.progress(step) == f"{left}loss 1"


def test_a_resumed_run_counts_the_steps_of_this_process(train):
    train(0).check()  # an epoch of 5 steps
    output = train(0, "optim.epochs=3", "optim.patience=9", fault="steps_left").check().stdout
    assert "epoch 2/3  step 10  5 done, 5 left  val loss " in output
    assert "epoch 3/3  step 15  10 done, 0 left  val loss " in output


# ---- Loops with a bar ----------------------------------------------------------------------------
def test_fitting_and_predicting_have_bars(monkeypatch, clock, terminal):
    monkeypatch.setattr("baseline.TARGETS_AT_ONCE", 1)
    clock.tick = 10.0  # makes all loops slow
    tables = combined_tables(num_rows=400)
    tables.y = torch.cat([tables.y, -tables.y], dim=1)
    tables.targets = ["plus", "minus"]
    fit_baseline(tables)
    shown = terminal.getvalue()
    assert re.search(r"fitting the baseline, .*1/2 ", shown)
    assert re.search(r"fitting sums of responses: .*8/9 ", shown)
    assert re.search(r"fitting combinations of responses: .*13/14 ", shown)
    assert not re.search(r"1[5-9]/14", shown)

    task = KnockoutTask.from_tables(
        additive_tables(noise=1.0), Config(data=DataConfig(batch_size=8))
    )
    predict_rows(task.build_model(), task, torch.arange(100), Distributed(DDPConfig()))
    assert re.search(r"predicting: .*12/13 ", terminal.getvalue())


@pytest.mark.usefixtures("few_resamples")
def test_an_analysis_has_bars(clock, terminal):
    clock.tick = 10.0
    rows = make_rows(40)
    metrics_by_group(rows)
    assert "resampling groups of rows: 8 groups " in terminal.getvalue()
    metrics_of_rivals(rows, {"zero": 0 * rows.y, "one": rows.y}, "squared")
    assert re.search(r"resampling for rivals: .*2/3 ", terminal.getvalue())
