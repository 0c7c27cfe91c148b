"""Progress bars, on stderr if that is a terminal."""

import sys
from collections.abc import Iterable
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
    delay: float = DELAY_S,
    is_shown: bool = True,
) -> ProgressBar:
    """Returns a bar that counts the steps that are iterated, or the calls of its method `update`.

    A single step has no bar. It appears after `delay` seconds; where all ranks count alike,
    `is_shown` is for rank 0.
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
        delay=delay,
    )
