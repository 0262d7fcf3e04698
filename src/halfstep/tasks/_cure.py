"""The one command that cures a failed run, from what its failed step came from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.guard.verdict import DATA, HARDWARE, WARM_UP, Cure, Verdict
from halfstep.train.advising import launcher, lower_rate, written_rate
from halfstep.train.black_box.record import Record
from halfstep.train.checkpoint.generation import CHECKPOINTS, generations
from halfstep.train.journal import journal as events
from halfstep.train.journal.cutting import JOURNAL
from halfstep.train.journal.jsonl import kept_events
from halfstep.train.run import GAVE_UP
from halfstep.train.run_folder import RECIPE, is_finished

REPAIR = "--guard repair"
"""It does by itself what the other commands do by hand."""
SKIP = "skip"
_MEND: dict[str, str] = {
    DATA: "mend the samples that are named, or leave them out",
    HARDWARE: "leave this batch out; look at the device where it comes back",
}


class Advice(NamedTuple):
    do: str
    command: str
    """Empty where there is nothing to type."""


def advice(verdict: Verdict, record: Record, run: Path, recipe: Any, task: Path | None) -> Advice:
    """What to do about it in words, and what to type."""
    cure = next((cure for cure in verdict.cures if cure.works is not False), None)
    words, setting = _for(verdict, cure, lower_rate(recipe.optimizer.lr, record.history.rates, _written_rate(run)))
    skipping = cure is not None and cure.kind == SKIP
    if skipping and is_finished(run):
        return Advice(f"{words}; this run went on without the batch", "")
    if setting == REPAIR and recipe.guard.mode == "repair":
        words, setting = words if skipping else f"{words}: the run did so already", ""
    return Advice(words, _command(record, run, setting, task))


def in_precision(name: str, record: Record, run: Path, task: Path | None) -> Advice:
    """For a step that was tried in another precision, and is finite in it."""
    return Advice(f"compute in {name}", _command(record, run, f"precision={name}", task))


def _written_rate(run: Path) -> float | None:
    """Of the recipe that the run was begun with, whatever was typed after it."""
    begun = next((event for event in kept_events(run / JOURNAL) if event["event"] == events.START), {})
    return written_rate(str(begun.get("command", "")))


def _command(record: Record, run: Path, setting: str, task: Path | None) -> str:
    finished = is_finished(run)
    if finished and not setting:
        return ""
    own = f"--task {shlex.quote(str(task))}" if task else ""
    changed = "--accept-recipe-change" if setting and setting != REPAIR else ""
    launched = f"{shlex.join(launcher(len(record.batches)))} train"
    anew = "--new" if finished or (changed and _has_only_spoilt(run)) else changed
    words = [launched, shlex.quote(str(run / RECIPE)), setting, own, anew]
    return " ".join(filter(None, words))


def _has_only_spoilt(run: Path) -> bool:
    """Whether the run gave up with checkpoints of which none is good."""
    ends = [event for event in kept_events(run / JOURNAL) if event["event"] == events.END]
    gave_up = bool(ends) and ends[-1].get("reason") == GAVE_UP and ends[-1].get("checkpoint") is None
    return gave_up and bool(generations(run / CHECKPOINTS))


def _for(verdict: Verdict, cure: Cure | None, rate: str) -> tuple[str, str]:
    if verdict.cause == WARM_UP:
        return "nothing: the loss scale finds its place by itself", ""
    if cure is None:
        return "let the run try what it can", REPAIR
    target = cure.target
    return {
        SKIP: (_MEND.get(verdict.cause, target), REPAIR),
        "island": (f"keep the module {target} in fp32" if target else "keep the model in fp32", REPAIR),
        "precision": (f"compute in {target}", f"precision={target}"),
        "lower_rate": ("try a lower learning rate", f"optimizer.lr={rate}"),
        "eager": ("run without compiled code", "train.compile=false"),
        "fix_code": (f"{target}; then go on", ""),
    }[cure.kind]
