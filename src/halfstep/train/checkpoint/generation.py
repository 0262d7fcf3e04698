"""The folders of checkpoints: one for each save, numbered through, and never used twice.

`step-00000120.0007` is the seventh save, taken after 120 attempted updates. After a rollback a step is saved again in a
folder of its own; the later save counts. A name that ends in `.tmp` is not committed, or no longer; `.bad` was found
damaged, and is kept for whoever wants to know why.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

CHECKPOINTS = "checkpoints"
"""The folder of them in a run's folder."""
DRAFT, BAD = ".tmp", ".bad"
_NAME = re.compile(r"step-([0-9]{8,15})\.([0-9a-f]{4,12})")


class Generation(NamedTuple):
    """A committed checkpoint, whole or damaged since."""

    path: Path
    attempt: int
    number: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def draft(self) -> Path:
        return self.path.with_name(self.path.name + DRAFT)


def named(folder: Path, attempt: int, number: int) -> Generation:
    return Generation(folder / f"step-{attempt:08d}.{number:04x}", attempt, number)


def generations(folder: Path) -> list[Generation]:
    """Those that were committed, the latest first. A run that has none yet has no folder, either."""
    return sorted(_matching(folder, ""), key=lambda one: one.number, reverse=True)


def following(folder: Path, attempt: int) -> Generation:
    """The next one; its number is above all that are there, drafts and damaged ones too."""
    taken = [one.number for suffix in ("", DRAFT, BAD) for one in _matching(folder, suffix)]
    return named(folder, attempt, max(taken, default=0) + 1)


def leftovers(folder: Path) -> list[Path]:
    """Drafts that were never committed, and old generations that are half removed."""
    return [one.path for one in _matching(folder, DRAFT)]


def set_aside(folder: Path) -> list[Path]:
    """Those that were found damaged, and are used no more."""
    return sorted(one.path for one in _matching(folder, BAD))


def _matching(folder: Path, suffix: str) -> list[Generation]:
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for path in entries:
        match = _NAME.fullmatch(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
        if match:
            found.append(Generation(path, int(match[1]), int(match[2], 16)))
    return found
