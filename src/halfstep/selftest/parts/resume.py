"""A training process is killed with SIGKILL and started again: its end is that of a run that nobody killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.checkpoint.paths import CHECKPOINTS, generations
from halfstep.selftest import training
from halfstep.selftest.part import Measured, PartContext, PartFailed, require

WHAT = "a training process is killed with SIGKILL and resumes: its last state is bitwise that of an unbroken run"
_KILLED_AT = 14
"""Between two saves, in the second half: some steps are taken again."""
_LAST_WORDS = 300


def check(place: PartContext) -> Measured:
    """Run once without a break and once with one, and compare the last checkpoints."""
    folder = place.written("resume")
    options = [str(place.device), place.chosen().name]
    with _begun(folder / "broken", *options, str(_KILLED_AT)) as broken, _begun(folder / "whole", *options) as unbroken:
        _wait_for(broken)
        _wait_for_save(folder / "broken", broken)
        broken.kill()
        broken.wait()
        whole = _ended(unbroken)
    saved = generations(folder / "broken" / CHECKPOINTS)[0].attempt
    with _begun(folder / "broken", *options) as again:
        resumed = _ended(again)
    require(resumed["steps"] == training.STEPS - saved, f"it was saved at step {saved} and began at another one")
    names = sorted({*whole["digests"], *resumed["digests"]})
    other = [name for name in names if whole["digests"].get(name) != resumed["digests"].get(name)]
    words = f"{len(other)} of {len(names)} tensors differ from an unbroken run's after a kill: {', '.join(other[:3])}"
    require(not other, words)
    figures = {"tensors": len(names), "killed_at": _KILLED_AT, "saved_at": saved, "steps": training.STEPS}
    return Measured(f"killed at {_KILLED_AT}, resumed at {saved}, {len(names)} bitwise", figures)


@contextmanager
def _begun(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a training process, and end it with the block."""
    command = [sys.executable, "-m", training.__name__, str(folder), *options]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _wait_for(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    line = child.stdout.readline()
    if training.WAITING not in line:
        raise _ended_early(child)


def _wait_for_save(folder: Path, child: subprocess.Popen[str]) -> None:
    """Wait until the writing thread has committed the newest save that was due."""
    due = (_KILLED_AT - 1) // training.SAVED_EVERY * training.SAVED_EVERY
    while not any(one.attempt >= due for one in generations(folder / CHECKPOINTS)):
        if child.poll() is not None:
            raise _ended_early(child)
        time.sleep(0.05)


def _ended(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate()
    if child.returncode != 0:
        raise PartFailed(f"training ended with {child.returncode}: {_last_of(err)}")
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def _ended_early(child: subprocess.Popen[str]) -> PartFailed:
    _, err = child.communicate()
    return PartFailed(f"training ended with {child.returncode} before it could be killed: {_last_of(err)}")


def _last_of(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The last lines of an error of halfstep's own say what is allowed and what to do; the first one is its reason.
    named = [line for line in lines if "Error" in line or "halfstep.errors" in line]
    return (named or lines or ["it said nothing"])[-1][-_LAST_WORDS:]
