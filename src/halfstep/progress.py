"""A progress bar with the time left, on standard error, so that what is printed stays clean."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 60.0
"""Between two lines where no bar can be drawn: a log shows that a long job lives, and is not filled by it."""
Tell = Callable[[int, int], None]


@contextmanager
def progress(what: str, unit: str) -> Iterator[Tell]:
    """Gives a function to be told (done, of). Where there is no terminal, a line is written now and then instead."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, what, unit)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        job = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(job, completed=done, total=of or None)


def _lines(console: Console, what: str, unit: str) -> Tell:
    began = last = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS or not done:
            return
        last = now
        minutes = (now - began) / done * max(of - done, 0) / 60.0
        left = f" of {of:,} {unit}, about {minutes:.0f} min left" if of else f" {unit}"
        console.print(f"{what}: {done:,}{left}", soft_wrap=True, highlight=False, markup=False)

    return tell
