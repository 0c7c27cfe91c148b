"""Progress bars with the time left, and the time left for a whole run.

A bar is drawn on stderr if that is a terminal.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from operator import length_hint
from threading import RLock

from tqdm import tqdm

DELAY_S = 5.0  # what takes less has no bar
MANY = 100_000  # of which a bar shows thousands or millions


class ProgressBar(tqdm):
    monitor_interval = 0  # seconds; 0: without tqdm's thread, which looks for bars that have stuck


# tqdm's own lock is one of processes, too: a rank that fails would leave a semaphore behind.
ProgressBar.set_lock(RLock())


def progress_bar(
    steps: Iterable | int,
    title: str,
    unit: str = "it",
    initial: int = 0,
    delay: float = DELAY_S,
    is_shown: bool = True,
) -> ProgressBar:
    """Returns a bar that counts the steps that are iterated, or the calls of its method `update`.

    A single step has no bar.

    Args:
        steps: what to iterate, or how many steps there are.
        title: what it begins with.
        unit: name of a step, in the speed that is shown.
        initial: steps that were made before, which do not count for the speed.
        delay: seconds until it appears.
        is_shown: whether there is a bar: where all ranks count alike, it is that of rank 0.
    """
    is_number = isinstance(steps, int)
    total = steps if is_number else length_hint(steps)
    return ProgressBar(
        None if is_number else steps,
        desc=title,
        total=total or None,
        leave=False,
        file=sys.stderr,
        miniters=1,
        disable=total == 1 or not is_shown or not sys.stderr.isatty(),
        unit=unit,
        unit_scale=total >= MANY,
        initial=initial,
        delay=delay,
    )


class RunProgress:
    """The progress of this process: a bar for each epoch, and the time left for the run.

    Args:
        num_steps: the steps that are left for this process.
        is_at_most: whether the run may end before these are made.
        is_shown: whether there is a bar.
    """

    def __init__(self, num_steps: int, is_at_most: bool, is_shown: bool = True):
        self.num_steps = num_steps
        self.is_shown = is_shown
        self.is_at_most = is_at_most
        self.steps_done = 0  # by this process: a resumed run's speed is not that of earlier ones
        self.started_at = None  # seconds, as `time.perf_counter`
        self.loss_and_speed = ""  # of the last steps

    def steps(self, steps: range, title: str) -> Iterator[int]:
        """Yields the steps of an epoch, and shows a bar of them."""
        if self.started_at is None:
            self.started_at = time.perf_counter()
        bar = progress_bar(steps, title, delay=0, is_shown=self.is_shown)
        for step in bar:
            yield step
            self.steps_done += 1
            bar.set_postfix_str(self.text(), refresh=False)

    def text(self) -> str:
        """Returns the time left for the run, and loss and speed; "" before the first step."""
        if self.steps_done == 0:
            return ""
        seconds = time.perf_counter() - self.started_at  # validations included
        seconds_left = seconds / self.steps_done * (self.num_steps - self.steps_done)
        if seconds_left < 1:
            return self.loss_and_speed
        limit = "at most " if self.is_at_most else ""
        left = tqdm.format_interval(seconds_left)
        return f"run: {limit}{left} left  {self.loss_and_speed}".rstrip()
