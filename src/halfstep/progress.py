"""A progress bar with the time left, on standard error, so that what is printed stays clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to be told (done, of). Nothing is drawn where there is no terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        job = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(job, completed=done, total=of or None)
