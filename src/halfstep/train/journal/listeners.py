"""Who listens to a run: its folder always, a person where there is one, a tracker where it is asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.console import Console

from halfstep.train.journal.console import LiveConsole
from halfstep.train.journal.cutting import JOURNAL, LOG
from halfstep.train.journal.journal import Listener, Remembering
from halfstep.train.journal.jsonl import JsonLines, kept_events
from halfstep.train.journal.plain import LogFile, Plain
from halfstep.train.journal.trackers import tracker_listeners


def listeners(dir: Path, *, tracker: str, console: Console | None, resumed_at: int | None = None) -> list[Listener]:
    """Listeners of a run in a folder; the curves come last, so that a person does not wait for them.

    A run that is taken up again after `resumed_at` attempts has a journal, already cut back: they learn it silently.
    """
    from halfstep.train.journal.curves import Curves  # loads matplotlib, which a wrong recipe must not wait for

    kept: list[Listener] = [JsonLines(dir / JOURNAL), LogFile(dir / LOG)]
    seen = [] if console is None else [console_listener(console)]
    everyone = [*kept, *seen, *tracker_listeners(tracker, dir, resumed_at), Curves(dir)]
    if resumed_at is not None:
        _remind(everyone, dir / JOURNAL)
    return everyone


def _remind(everyone: list[Listener], path: Path) -> None:
    remembering = [listener for listener in everyone if isinstance(listener, Remembering)]
    for event in kept_events(path):
        for listener in remembering:
            # A damaged line that is still an event is no reason not to train.
            with contextlib.suppress(Exception):
                listener.recall(event)


def console_listener(console: Console) -> Listener:
    """Live where a cursor can move; plain lines in files, pipes, notebooks and dumb terminals."""
    if console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal:
        return LiveConsole(console)
    return Plain(console.file)
