"""The runs that journeys share: each is trained once in a session, whichever worker needs it first."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.journeys.desk import Desk

SEGMENT = ("train", "segment", "--data_dir", "photos", "--epochs", "3", "--crop", "96", "--tracker", "tensorboard")
CLASSIFY = ("train", "classify", "--data_dir", "classes", "--epochs", "2")


class Trained(NamedTuple):
    """A finished run, with the command that made it and what it said."""

    desk: Desk
    run: str
    command: tuple[str, ...]
    screen: str

    @property
    def folder(self) -> Path:
        return self.desk.folder / self.run


def trained_once(shared: Path, name: str, data: Callable[[Path], object], command: tuple[str, ...]) -> Trained:
    """The first worker that comes trains; the others wait for it and find its run."""
    desk = Desk(shared / name, shared / "cache")
    said = shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            data(desk.folder)
            said.write_text(json.dumps(outcome(desk, command)))
    told = json.loads(said.read_text())
    assert told["failure"] is None, told["failure"]
    return Trained(desk, f"runs/{command[1]}", command, told["screen"])


def outcome(desk: Desk, command: tuple[str, ...]) -> dict[str, str | None]:
    """What the screen said, or how it failed: nobody trains again what failed once."""
    try:
        return {"screen": desk.run(*command).text, "failure": None}
    except AssertionError as error:
        return {"screen": None, "failure": str(error)}
