"""Progress bars on stderr, if stderr is a terminal."""

import sys
from collections.abc import Iterable
from operator import length_hint
from threading import RLock

from tqdm import tqdm

DELAY_S = 5.0  # loops that take less time do not show a bar
MANY = 100_000  # bars with at least this number of steps count in thousands or millions


class ProgressBar(tqdm):
    """A bar of tqdm without its monitor thread and without its lock between processes."""

    monitor_interval = 0  # seconds between updates by the monitor thread; 0: no such thread


# By default, tqdm uses a lock between processes. If a rank failed, the semaphore of this lock would
# remain in the system.
ProgressBar.set_lock(RLock())


def progress_bar(
    steps: Iterable | int,
    title: str,
    unit: str = "it",
    delay: float = DELAY_S,
    is_shown: bool = True,
) -> ProgressBar:
    """Returns a progress bar, which is only shown if stderr is a terminal.

    Args:
        steps: an iterable whose items the bar yields and counts, or the total number of steps. In
            the second case, calls of the method `update` count the steps. A single step has no bar.
        title: the text in front of the bar.
        unit: the name of a step.
        delay: the bar appears after this number of seconds.
        is_shown: whether the bar is shown at all. If all ranks make the same steps, set this only
            on rank 0.
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
