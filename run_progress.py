"""Progress bars on stderr, if stderr is a terminal."""

import sys
from collections.abc import Iterable
from operator import length_hint
from threading import RLock

from tqdm import tqdm

DELAY_S = 5.0  # a loop that takes less time has no bar
MANY = 100_000  # from this number of steps on, a bar counts in thousands or millions


class ProgressBar(tqdm):
    monitor_interval = 0  # seconds; 0: without tqdm's thread, which updates bars that hang


# tqdm's default lock also locks processes, and a rank that fails would leave a semaphore behind.
ProgressBar.set_lock(RLock())


def progress_bar(
    steps: Iterable | int,
    title: str,
    unit: str = "it",
    delay: float = DELAY_S,
    is_shown: bool = True,
) -> ProgressBar:
    """Returns a bar that counts the steps of an iterable, or the calls of its method `update`.

    There is no bar for a single step. The bar appears after `delay` seconds. If all ranks make the
    same steps, set `is_shown` only on rank 0.
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
