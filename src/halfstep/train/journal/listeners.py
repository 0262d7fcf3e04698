"""Who listens to a run: its folder always, a person where there is one, a tracker where it is asked for."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from halfstep.train.journal.console import LiveConsole
from halfstep.train.journal.journal import Listener
from halfstep.train.journal.jsonl import JsonLines
from halfstep.train.journal.plain import LogFile, Plain
from halfstep.train.journal.trackers import tracker_listeners

JOURNAL, LOG = "journal.jsonl", "train.log"


def listeners(dir: Path, *, tracker: str, console: Console | None) -> list[Listener]:
    """Listeners of a run in a folder; the curves come last, so that a person does not wait for them."""
    from halfstep.train.journal.curves import Curves  # loads matplotlib, which a wrong recipe must not wait for

    kept: list[Listener] = [JsonLines(dir / JOURNAL), LogFile(dir / LOG)]
    seen = [] if console is None else [console_listener(console)]
    return [*kept, *seen, *tracker_listeners(tracker, dir), Curves(dir)]


def console_listener(console: Console) -> Listener:
    """Live where a cursor can move; plain lines in files, pipes, notebooks and dumb terminals."""
    if console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal:
        return LiveConsole(console)
    return Plain(console.file)
