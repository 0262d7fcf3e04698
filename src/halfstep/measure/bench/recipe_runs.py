"""A recipe trained in a process of its own for each arm and seed, by the command that a person would type."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.files import read_json, write_json
from halfstep.measure.bench.journals import result_of
from halfstep.measure.bench.results import RunFailed, RunResult
from halfstep.measure.process import end_process
from halfstep.train.checkpoint.generation import CHECKPOINTS

_LAST_WORDS = 4000
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY = 0.05
"""Seconds; a run's own figures are from its journal, so this costs none of them."""


class Patience:
    """How long a run may take, by what others took: one that hangs would hold up the rest for ever."""

    SHORTEST = 600.0
    TIMES = 10.0

    def __init__(self) -> None:
        self._slowest: float | None = None

    def learn(self, seconds: float | None) -> None:
        self._slowest = max(self._slowest or 0.0, seconds or 0.0) or None

    @property
    def limit(self) -> float | None:
        """In seconds; none before a run has ended, as nobody knows how long the first one takes."""
        return None if self._slowest is None else max(self.SHORTEST, self.TIMES * self._slowest)


@dataclass(frozen=True)
class RecipeArm:
    """One arm of a recipe: its settings, and where its runs lie."""

    text: str
    settings: tuple[str, ...]
    """What was typed, and what makes this arm."""
    folder: Path
    name: str
    identity: Mapping[str, Any]
    """What has to be as it was for a finished run to be taken instead of another one."""
    patience: Patience = field(default_factory=Patience)
    """Shared by the arms of a bench."""

    def __call__(self, seed: int) -> RunResult:
        """The result of an earlier bench in this folder, or that of a new run."""
        known = {**self.identity, "seed": seed}
        kept = self.beside(f"seed-{seed}")
        found = read_json(kept)
        if isinstance(found, dict) and found.get("identity") == known:
            result = RunResult.from_dict(found["result"])
            self.patience.learn(result.seconds)
            return result
        began = time.monotonic()
        result = self._train(seed)
        self.patience.learn(time.monotonic() - began)
        write_json(kept, {"identity": known, "result": result.as_dict()})
        return result

    def beside(self, what: str) -> Path:
        """Where something that was found out of this arm is kept."""
        plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in self.name)
        return self.folder / "runs" / f"{plain}-{what}.json"

    def others(self, seeds: Sequence[int]) -> Path | None:
        """A result that is kept here of another recipe or other conditions, if there is one: it is not ours to lose."""
        for seed in seeds:
            found = read_json(self.beside(f"seed-{seed}"))
            if isinstance(found, dict) and found.get("identity") != {**self.identity, "seed": seed}:
                return self.beside(f"seed-{seed}")
        return None

    def _train(self, seed: int) -> RunResult:
        place = self.beside(f"seed-{seed}").with_suffix("")
        if (place / "recipe.yaml").exists():  # of a run that did not end: a figure is of a run in one piece
            shutil.rmtree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "halfstep", "train", self.text, *self.settings]
        words += [f"train.seed={seed}", f"run.dir={place}", "train.strict=true", "--json"]
        code, resident = run_to_end(words, place.with_suffix(".log"), self.patience.limit)
        if code != 0:
            raise RunFailed(_why(code, place.with_suffix(".log")))
        result = result_of(place / "journal.jsonl", seed, resident)
        shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)  # nobody goes on with a finished run
        return result


def run_to_end(words: Sequence[str], log: Path, limit: float | None = None) -> tuple[int, int | None]:
    """The exit code, and the most bytes that the process had; it and its own processes end with us."""
    with log.open("wb") as said:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
                                 preexec_fn=_dying_with_us())  # fmt: skip
        try:
            return _waited(child, limit)
        except BaseException:
            end_process(child)
            raise


def _dying_with_us() -> Callable[[], object] | None:
    """On Linux a process may ask to be ended when the one that started it is gone, however that went."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # looked up here: little may be done between fork and exec
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _waited(child: subprocess.Popen[bytes], limit: float | None) -> tuple[int, int | None]:
    if not hasattr(os, "wait4"):
        try:
            return child.wait(limit), None
        except subprocess.TimeoutExpired:
            raise _too_long(limit) from None
    import resource

    deadline = time.monotonic() + (limit or float("inf"))
    ended = 0
    while not ended:
        ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        if not ended:
            if time.monotonic() > deadline:
                raise _too_long(limit)
            time.sleep(_LOOK_EVERY)
    child.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    # A process begins as a copy of ours, whose size is counted as its own: only what is more than that is its own.
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return child.returncode, usage.ru_maxrss * unit if usage.ru_maxrss > ours else None


def _too_long(limit: float | None) -> RunFailed:
    return RunFailed(f"it did not end within {limit:.0f} s, {Patience.TIMES:.0f} times the slowest other run or more")


def _why(code: int, log: Path) -> str:
    if code == -signal.SIGTERM or code == -9:
        return "its process was ended from outside, as a system does that has no memory left"
    lines = [line for line in log.read_text("utf-8", "replace")[-_LAST_WORDS:].splitlines() if line.strip()]
    if not lines:
        return f"its process ended with code {code}"
    # Errors of ours begin with what was given; a traceback ends with what was raised.
    return (lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]).strip()
