"""Choose the listeners of a run: its folder always, a console if there is one, a tracker on request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from halfstep.errors import build_unknown_name_error
from halfstep.journal.console import LiveConsole
from halfstep.journal.curves import CurvesListener
from halfstep.journal.events import Listener, StatefulListener
from halfstep.journal.guide import GuideLog, GuideScreen
from halfstep.journal.jsonl import JOURNAL, LOG, JsonLinesListener, iterate_saved_events
from halfstep.journal.lines import GUIDE, TABLE
from halfstep.journal.plain import LogFileListener, PlainListener
from halfstep.journal.prometheus import METRICS, Prometheus
from halfstep.journal.table import TableConsole
from halfstep.journal.trackers import TRACKERS


def create_listeners(
    dir: Path,
    *,
    tracker: str,
    console: Console | None,
    style: str = TABLE,
    resumed_at: int | None = None,
    prometheus: bool | str = False,
    largest_file: float = math.inf,
) -> list[Listener]:
    """Return the listeners of a run in a folder; the curves come last, so that the console does not wait for them.

    A run that resumes after `resumed_at` attempts has a journal, which is cut back already; listeners recall it
    silently. `style` is that of the console, `run.console`. `prometheus` is the file with its metrics, or whether there
    is one in the folder; `largest_file` are the bytes after which the journal continues in another file.
    """
    files: list[Listener] = [JsonLinesListener(dir / JOURNAL, largest_file), LogFileListener(dir / LOG)]
    screen = [] if console is None else [create_console_listener(console, style)]
    trackers = create_tracker_listeners(tracker, dir, resumed_at)
    if prometheus:
        trackers.append(Prometheus(dir / (METRICS if prometheus is True else prometheus)))
    every_listener = [*files, *screen, *trackers, CurvesListener(dir)]
    if resumed_at is not None:
        restore_listeners(every_listener, dir / JOURNAL)
    return every_listener


def create_tracker_listeners(name: str, folder: Path, resumed_at: int | None = None) -> list[Listener]:
    """Return the listener of a tracker, or none for `none`; a resumed run continues after `resumed_at` attempts.

    Raises UnknownName for an unknown name, MissingExtra if the tracker is not installed, and WrongUse if MLflow has no
    server.
    """
    if name not in TRACKERS:
        raise build_unknown_name_error("tracker", name, TRACKERS)
    if name == "tensorboard":
        from halfstep.journal.tensorboard import TensorBoard

        return [TensorBoard(folder / "tensorboard", resumed_at)]
    if name == "wandb":
        from halfstep.journal.wandb import WeightsAndBiases

        return [WeightsAndBiases(folder)]
    if name == "mlflow":
        from halfstep.journal.mlflow import MLflow

        return [MLflow(folder)]
    return []


def restore_listeners(every_listener: Sequence[Listener], path: Path) -> None:
    """Tell those listeners that need them the events of earlier launches."""
    remembering = [listener.restore_event for listener in every_listener if isinstance(listener, StatefulListener)]
    for event in iterate_saved_events(path):
        for restore_event in remembering:
            # An event from a damaged line may lack fields; that is no reason not to train. `suppress` would take as
            # long as the listener does.
            try:  # noqa: SIM105
                restore_event(event)
            except Exception:
                pass


def create_console_listener(console: Console, style: str = TABLE) -> Listener:
    """Return the live console if the cursor can move, and the one of a notebook in its kernel.

    Returns plain lines for files, pipes, commands of a notebook's cell, and dumb terminals.
    """
    if console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal:
        return LiveConsole(console, GuideScreen() if style == GUIDE else TableConsole(is_live=True))
    if console.is_jupyter and style != GUIDE:
        from halfstep.journal.notebook import NotebookListener, find_notebook_display  # it loads what draws HTML

        display = find_notebook_display()
        if display is not None:
            return NotebookListener(display)
    return PlainListener(console.file, GuideLog() if style == GUIDE else TableConsole(is_live=False))
