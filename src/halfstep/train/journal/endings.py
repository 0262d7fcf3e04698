"""What became of a run, and from where the same command would go on."""

from __future__ import annotations

import os
import shlex

from halfstep.train.journal import numbers
from halfstep.train.journal.journal import Event
from halfstep.train.journal.latest import Checkpoint, Latest
from halfstep.train.journal.words import clean, named, several, skips

STOPPED, GAVE_UP = "stopped", "gave_up"
_ENDINGS = {
    "finished": "Finished",
    "early_stopping": "Stopped early",
    "interrupted": "Interrupted",
    "failed": "Failed",
    STOPPED: "Stopped",
    GAVE_UP: "Gave up",
}
_UNFINISHED = ("interrupted", "failed", STOPPED)
TO_TYPE = "do:"
"""What the line begins with that a person is to type."""
_KEPT = ("best", "last", "curves")


def ending(event: Event, latest: Latest) -> list[str]:
    """The last lines of a run, the first of them for a hurried reader."""
    reason = _ENDINGS.get(event["reason"], clean(event["reason"]))
    told = f"{reason} after {numbers.duration(event['seconds'])}: {several(event['steps'], 'step')} applied"
    lines = [f"{told}, {skips(event.get('skipped') or {})}"]
    if event.get("why"):
        lines += _in_lines(event["why"])
    lines += [clean(f"  cured by the guard: {cure}") for cure in event.get("cures") or ()]
    if event["reason"] in _UNFINISHED:
        lines.append(f"  {_to_go_on(event, latest)}")
    elif latest.checkpoint is not None and event["reason"] != GAVE_UP:
        lines.append(f"  last checkpoint: {_named(latest.checkpoint)}")
    best = event.get("best") or {}
    if best.get("value") is not None:
        lines.append(f"  best {named(best['metric'])}: {numbers.value(best['value'])}, in epoch {best['epoch']}")
    folder = latest.start.get("dir", "")
    kept = {what: file for what, file in latest.saved.items() if what in _KEPT}
    lines += [clean(f"  {what} saved in: {os.path.join(folder, file)}") for what, file in kept.items()]
    return lines + _in_lines(event.get("kept")) + _in_lines(f"{TO_TYPE} {event['do']}" if event.get("do") else "")


def _in_lines(text: str | None) -> list[str]:
    """Text of several lines, each of which can be printed."""
    return [f"  {clean(line)}" for line in (text or "").splitlines() if line.strip()]


def _to_go_on(event: Event, latest: Latest) -> str:
    signal = event.get("signal")
    if event.get("checkpoint"):
        by = f"stopped by {signal} {_place(latest)}: " if signal else ""
        return clean(f"{by}saved as {event['checkpoint']}; {_again(latest)}")
    by = f"stopped by {signal} {_place(latest)} without saving: " if signal else ""
    if latest.checkpoint is None:
        return clean(f"{by}no checkpoint was written yet: the same command starts again from step 0")
    return f"{clean(f'{by}{_again(latest)}')} from checkpoint {_named(latest.checkpoint)}"


def _again(latest: Latest) -> str:
    """What goes on with the run; a command with --new would begin another one, in a folder of its own."""
    if "--new" in str(latest.start.get("command", "")).split():
        folder = shlex.quote(f"run.dir={latest.start.get('dir', '')}")
        return f"start it again without --new, with {folder}, to go on"
    return "start it again with the same command to go on"


def _named(checkpoint: Checkpoint) -> str:
    return f"{clean(checkpoint.name)} (step {numbers.count(checkpoint.attempt)})"


def _place(latest: Latest) -> str:
    steps = latest.start.get("steps")
    of = f" of {numbers.count(steps)}" if steps else ""
    return f"at step {numbers.count(latest.attempt)}{of}"
