"""Print to the user's terminal, with foreign text made harmless: see `printable`.

All consoles are created here. They interpret no markup (a file may be called `x[/b].png`), no emoji codes, and no
control characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from halfstep.printable import escape_unprintable
from halfstep.status_line import OnProgress, clear_status_line, is_in_notebook


class SafeConsole(Console):
    """A rich console that emits no control codes but its own."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print after erasing the status line."""
        clear_status_line()
        super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments with their text made printable."""
        # Here, not in print: tables, panels and tracebacks reach the terminal only as segments.
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_unprintable(segment.text), segment.style)


def create_console(**options: Any) -> SafeConsole:
    """Return a console for stdout, or for stderr with `stderr=True`; pass styles as Text, not inside strings."""
    if is_in_notebook():
        # Jupyter sets FORCE_COLOR, by which rich takes a pipe for a terminal, too.
        options = {"force_terminal": False, **options}
    return SafeConsole(highlight=False, markup=False, emoji=False, **options)


def print_plain_text(text: object) -> None:
    """Print lines as they are, without wrapping or color: for copying, or for other programs."""
    clear_status_line()
    sys.stdout.write(f"{escape_unprintable(text)}\n")
    sys.stdout.flush()


SECONDS = 60.0
"""Seconds between two lines where no bar can be drawn: enough to show that a job is alive without filling the log."""


@contextmanager
def display_progress(what: str, unit: str) -> Iterator[OnProgress]:
    """Yield a function that takes (done, total). Without a terminal, a line is printed now and then instead."""
    clear_status_line()
    console = create_console(stderr=True)
    if not console.is_terminal:
        yield _build_line_printer(console, what, unit)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        job = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(job, completed=done, total=of or None)


def _build_line_printer(console: Console, what: str, unit: str) -> OnProgress:
    began = last = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS or not done:
            return
        last = now
        minutes = (now - began) / done * max(of - done, 0) / 60.0
        about = f"about {minutes:.0f} min left" if minutes >= 0.5 else "less than a minute left"
        left = f" of {of:,} {unit}, {about}" if of else f" {unit}"
        console.print(f"{what}: {done:,}{left}", soft_wrap=True)

    return tell
