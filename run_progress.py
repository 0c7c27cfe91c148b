"""Progress bars with the time left, and the time left for a whole run.

A bar is drawn on stderr. Where that is no terminal but a file, it is a line of text, at most every
`FILE_S` seconds.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from threading import RLock
from typing import Any, ClassVar

from tqdm import tqdm

DELAY_S = 5.0  # what takes less has no bar
TERMINAL_S = 0.1  # from one drawing of a bar to the next
FILE_S = 30.0  # the same, and the delay of the first, where stderr is a file
MANY = 100_000  # of which a bar shows thousands or millions


class ProgressBar(tqdm):
    """A bar on a terminal, which leaves nothing behind, or lines of text in a file.

    Args:
        note: returns what the bar ends with; it is called whenever the bar is drawn.
    """

    monitor_interval = 0  # seconds; 0: without tqdm's thread, which looks for bars that have stuck
    listeners: ClassVar[list[Callable[[], None]]] = []  # called with each step, shown or not

    def __init__(self, *args: Any, note: Callable[[], str] | None = None, **options: Any):
        self.note = note
        self.is_on_terminal = sys.stderr.isatty()
        self.is_drawn = False
        super().__init__(*args, **options)

    def __iter__(self) -> Iterator[Any]:
        for step in super().__iter__():
            yield step
            self.tell_listeners()

    def update(self, n: float = 1) -> bool | None:
        """Counts `n` more steps; returns whether the bar was drawn."""
        self.tell_listeners()
        return super().update(n)

    def tell_listeners(self) -> None:
        for listener in self.listeners:
            listener()

    @property
    def format_dict(self) -> dict[str, Any]:
        """The fields of tqdm's bar, with our note."""
        fields = super().format_dict
        if self.note:
            fields["postfix"] = self.note()
        return fields

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draws the bar, or the text `msg` in its place; returns whether tqdm drew on a terminal.

        In a file, a bar within another one is left out.
        """
        with contextlib.suppress(OSError):  # stderr may be a closed pipe or on a full disk
            if self.is_on_terminal:
                self.is_drawn = msg is None
                return super().display(msg, pos)
            if msg is None and self.pos == 0:
                self.fp.write(f"{self}\n")
                self.fp.flush()
        return False


# tqdm's own lock is one of processes, too: a rank that fails would leave a semaphore behind.
ProgressBar.set_lock(RLock())


def progress_bar(
    steps: Iterable | int,
    title: str,
    unit: str = "it",
    initial: int = 0,
    delay: float = DELAY_S,
    note: Callable[[], str] | None = None,
    is_shown: bool = True,
) -> ProgressBar:
    """Returns a bar that counts the steps that are iterated, or the calls of its method `update`.

    A single step has no bar.

    Args:
        steps: what to iterate, or how many steps there are.
        title: what it begins with.
        unit: name of a step, in the speed that is shown.
        initial: steps that were made before, which do not count for the speed.
        delay: seconds until it appears on a terminal.
        note: returns what it ends with; it is called whenever the bar is drawn.
        is_shown: whether there is a bar: where all ranks count alike, it is that of rank 0.
    """
    is_number = isinstance(steps, int)
    total = steps if is_number else length_hint(steps)
    is_file = not sys.stderr.isatty()
    return ProgressBar(
        None if is_number else steps,
        desc=title,
        total=total or None,
        leave=False,
        file=sys.stderr,
        mininterval=FILE_S if is_file else TERMINAL_S,
        miniters=1,
        disable=total == 1 or not is_shown,
        unit=unit,
        unit_scale=total >= MANY,
        initial=initial,
        delay=FILE_S if is_file else delay,
        note=note,
    )


@contextlib.contextmanager
def bars_call(listener: Callable[[], None]) -> Iterator[None]:
    """In the block, calls a function with each step of any bar, shown or not."""
    ProgressBar.listeners.append(listener)
    try:
        yield
    finally:
        ProgressBar.listeners.remove(listener)


class BarClearer(logging.Handler):
    """Clears bars before a line of the log is printed; they are drawn again with the next step."""

    def emit(self, record: logging.LogRecord) -> None:
        for bar in list(tqdm._instances):
            if getattr(bar, "is_drawn", False):
                bar.is_drawn = False
                with contextlib.suppress(OSError):
                    bar.clear(nolock=True)  # a thread that hangs may have the lock


def time_left(seconds: float, steps_done: int, steps_left: int) -> str:
    """Returns the time that the steps left will take as a text, such as `12:34 left`.

    It is "" for less than a second, or if no step is done. `seconds` is the time that the steps
    done took.
    """
    if steps_done == 0:
        return ""
    seconds_left = steps_left * seconds / steps_done
    if seconds_left < 1:
        return ""
    return f"{tqdm.format_interval(seconds_left)} left"


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
        bar = progress_bar(steps, title, delay=0, note=self.text, is_shown=self.is_shown)
        for step in bar:
            yield step
            self.steps_done += 1

    def text(self) -> str:
        """Returns the time left for the run, and loss and speed; "" before the first step."""
        if self.steps_done == 0:
            return ""
        seconds = time.perf_counter() - self.started_at  # validations included
        left = time_left(seconds, self.steps_done, self.num_steps - self.steps_done)
        if not left:
            return self.loss_and_speed
        limit = "at most " if self.is_at_most else ""
        return f"run: {limit}{left}  {self.loss_and_speed}".rstrip()
