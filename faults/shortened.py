"""Deadlines made short, so that a row about waiting does not wait; and what else happens to a process at its start."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.runs import fit
from halfstep.train.signals import StopSignalHandler, end_process
from halfstep.train.watchdog import end_hung_process


@dataclass(frozen=True)
class Shortened:
    """Called in a process before its run. Made in another one, so it holds nothing but plain data."""

    deadlines: Mapping[str, float]
    """New values of names in modules of halfstep, such as `train.watchdog.REPORT`."""
    then: Callable[[], object] | None = None

    def __call__(self) -> None:
        for place, seconds in self.deadlines.items():
            module, _, name = place.rpartition(".")
            found = importlib.import_module(f"halfstep.{module}")
            assert hasattr(found, name), place
            setattr(found, name, seconds)
        if self.then is not None:
            self.then()


def as_command() -> None:
    """Let a run end its process where nothing else helps, as `halfstep train` does."""
    fit.launch = functools.partial(fit.launch, on_hang=end_hung_process)
    fit.StopSignalHandler = functools.partial(StopSignalHandler, end_process)  # type: ignore[misc, assignment]


@dataclass(frozen=True)
class HungDisk:
    """From the moment a file `flag` is there, these calls of `os` never return for paths with these words in them."""

    calls: tuple[str, ...]
    words: str
    flag: str

    def __call__(self) -> None:
        as_command()
        for name in self.calls:
            setattr(os, name, functools.partial(self._called, getattr(os, name)))

    def _called(self, call: Any, *given: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{given[0]}") if isinstance(given[0], int) else str(given[0])
        if self.words in path and Path(self.flag).exists():
            time.sleep(3600.0)
        return call(*given, **more)
