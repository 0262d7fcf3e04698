"""A run whose folder is removed, moved or taken by another run while it trains, on one rank or more."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import rig
from faults.job import HALVED, Job
from faults.judged import first_wrong
from faults.slowed import SlowSteps
from halfstep.journal.jsonl import JOURNAL, LOG

SETTINGS: dict[str, Any] = {"train.steps": 300, "checkpoint.every_steps": 10}
"""All saves, weights and evaluations are at each tenth step, and nothing is written between."""
OTHER: dict[str, Any] = {"train.steps": 30, "train.seed": 12}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ddp": (2, HALVED),
    "fsdp": (2, {**HALVED, "world.mode": "fsdp"}),
}
WITHIN = 30.0
"""Seconds until a run has noticed; a few steps, on cores that are busy."""
Tree = dict[str, str]
"""The files and folders below a folder, and a digest of each."""


def disturbed(
    folder: Path, world: str, step: int, disturb: Callable[[], object], code: int, said: str, ended_by: str = ""
) -> str | None:
    """What does not hold of a run whose folder is disturbed at a step: it ends with `code`, and touches nothing.

    `ended_by` names a signal that it gets afterwards, as a person would send.
    """
    ranks, settings = WORLDS[world]
    job = _Alone(folder) if ranks == 1 else Job(folder, ranks)
    job.start({**SETTINGS, **settings}, task=SlowSteps)
    begun = rig.wait_for(lambda: rig.last_step(folder) >= step)
    # Between two steps that write: nothing is under way that was allowed before.
    for rank in range(ranks):
        job.send(rank, signal.SIGSTOP)
    disturb()
    left, had_end = tree(folder), has_an_end(folder)
    for rank in range(ranks):
        if ended_by:
            job.send(rank, signal.Signals[ended_by])
        job.send(rank, signal.SIGCONT)
    codes = job.codes(WITHIN)
    return first_wrong(
        ("the run had begun", lambda: begun),
        (f"every rank ends with {code}: {codes}", lambda: codes == [code] * ranks),
        ("it says why", lambda: said in job.said(0)),
        ("nothing is touched or created", lambda: tree(folder) == left),
        ("nobody's journal has its end", lambda: has_an_end(folder) == had_end),
    )


class _Alone(Job):
    """A run without a process group."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 1

    def start(self, settings: Any = None, **more: Any) -> Job:
        self.ranks = [rig.start(self.folder, settings, **more)]
        return self

    def said(self, rank: int) -> str:
        return rig.said(self.folder)


def tree(folder: Path) -> Tree:
    """Everything below a folder; empty where it does not exist."""
    found = sorted(folder.rglob("*")) if folder.exists() else []
    return {str(path.relative_to(folder)): _digest(path) for path in found}


def _digest(path: Path) -> str:
    if not path.is_file():
        return "folder"
    content = path.read_bytes()
    # A run that has its journal open writes steps to it until it notices, but not its end.
    return content[:1000].hex() if path.name in (JOURNAL, LOG) else hashlib.sha256(content).hexdigest()


def has_an_end(folder: Path) -> bool:
    return (folder / JOURNAL).exists() and b'"event":"end"' in (folder / JOURNAL).read_bytes()
