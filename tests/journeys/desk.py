"""Where a person works: a folder with photographs, and commands typed in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.journeys.terminal import Terminal

PATIENCE = 150.0
"""Seconds after which a command that should end is given up."""


class Desk:
    """A folder that commands are typed in."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self._cache = folder, cache
        folder.mkdir(parents=True, exist_ok=True)

    def type(
        self,
        *words: object,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Terminal:
        """Starts a command, which goes on while its screen is read."""
        typed = [str(word) for word in words]
        return Terminal(typed, self.folder, {"XDG_CACHE_HOME": str(self._cache), **(environment or {})}, before)

    def run(
        self, *words: object, code: int = 0, seconds: float = PATIENCE, environment: Mapping[str, str] | None = None
    ) -> Terminal:
        """Types a command and waits for its end, which must be the one that was expected."""
        with self.type(*words, environment=environment) as terminal:
            ended = terminal.finish(seconds)
        assert ended == code, f"exit code {ended}, not {code}: halfstep {' '.join(map(str, words))}\n{terminal.text}"
        return terminal

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        """The events of one kind in a run's journal so far; a line that is still being written is left out."""
        path = self.folder / run / "journal.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = []
        for line in lines:
            if f'"{kind}"' in line and line.endswith("}"):
                event = json.loads(line)
                found += [event] if event["event"] == kind else []
        return found

    def files(self, pattern: str) -> set[Path]:
        return {path for path in self.folder.rglob(pattern) if path.is_file()}


def crowding() -> float:
    """How many jobs there are for each core, 1 at least: what a bound in seconds of the wall clock is multiplied by."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
