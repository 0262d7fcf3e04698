"""Processes that die, and what they leave: started from a server that has loaded torch already, judged by every bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from faults import child, mutants
from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events, read_events
from tests.support.digest import digest_of
from tests.support.preloaded import server

LONGEST = 60.0
"""Seconds after which a process has hung."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in the main memory, where the system has one: there, a flush costs nothing."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def start(folder: Path, settings: Mapping[str, Any] | None = None, **more: Any) -> BaseProcess:
    """A run in a process of its own; see `child.run`."""
    more = {"mutant": mutants.current(), **more}
    process = server().Process(target=child.run, args=(str(folder), dict(settings or {})), kwargs=more)
    process.start()
    return process


def ended(process: BaseProcess, within: float = LONGEST) -> int:
    """The exit code; negative for a signal, as Python has it. A process that hangs is killed, and 124 returned."""
    process.join(within)
    if process.exitcode is None:
        process.kill()
        process.join()
        return 124
    return process.exitcode


def run(folder: Path, settings: Mapping[str, Any] | None = None, **more: Any) -> int:
    """A run from its start to its end; its exit code."""
    return ended(start(folder, settings, **more))


def kill(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def said(folder: Path, rank: int | None = None) -> str:
    """The error that the last run in a folder ended with, on this rank where there are several."""
    path = child.own_file(folder, ".err", rank)
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Ending:
    """What a finished run comes to, to the bit."""

    losses: tuple[str, ...]
    """Of every step, as float.hex."""
    state: str
    """SHA-256 of the last checkpoint's content, but for what is no part of the training: the journal's length."""
    weights: str


def ending(folder: Path) -> Ending:
    """Of a run that came to its end; an error where it did not."""
    events = read_events(folder / "journal.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    assert [event["attempt"] for event in steps] == list(range(1, len(steps) + 1)), "steps are missing, or there twice"
    result = json.loads((folder / "result.json").read_text())
    return Ending(tuple(_hex(event["loss"]) for event in steps), state_digest(folder), result["weights"])


def state_digest(folder: Path) -> str:
    verdict, _ = find_newest_intact(folder / CHECKPOINTS)
    assert verdict is not None, "no checkpoint"
    plain, tensors = read_rank_state(verdict.generation, 0)
    plain["position"].pop("journal_sizes")
    plain["recipe"].pop("run")
    return digest_of(plain, tensors)


def _hex(value: Any) -> str:
    return value.hex() if isinstance(value, float) else str(value)


def committed(folder: Path) -> list[int]:
    """The steps of which the journal says that they are saved."""
    try:
        events = read_events(folder / "journal.jsonl")
    except Exception:
        return []
    return [event["attempt"] for event in events if event["event"] == "saved" and event.get("kind") == "checkpoint"]


def last_step(folder: Path) -> int:
    """The last one that the journal tells of, as far as it is written; 0 without any."""
    steps = [event["attempt"] for event in iterate_saved_events(folder / JOURNAL) if event["event"] == "step"]
    return max(steps, default=0)


def wait_for(condition: Any, within: float = LONGEST) -> bool:
    """Whether something came true in time."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.005)
    return False


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
