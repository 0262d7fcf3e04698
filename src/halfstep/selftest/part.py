"""A part of the self-test: the place where it runs, and the three ways in which it ends."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from halfstep.precision.hardware import Device, find_format_support
from halfstep.precision.names import list_precision_names
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.precision.select import choose_precision

ROOM = 64 * 2**20
"""Bytes that a part may write, with much to spare."""


class PartFailed(Exception):
    """Something that was promised does not hold here; the message says what."""


class PartSkipped(Exception):
    """The part cannot run here; the message says why."""


@dataclass(frozen=True)
class PartContext:
    """Where a part runs."""

    described: Device
    folder: Path | None = None
    """A folder that may be written; None if there is none."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.described.place)

    def written(self, name: str) -> Path:
        """Return a new folder; raise PartSkipped where nothing can be written, or little."""
        if self.folder is None:
            raise PartSkipped("no temporary folder can be written: set TMPDIR to one that can")
        free = shutil.disk_usage(self.folder).free
        if free < ROOM:
            raise PartSkipped(f"the temporary folder has {free >> 20} of {ROOM >> 20} MiB free: set TMPDIR to another")
        folder = self.folder / name
        folder.mkdir()
        return folder

    def native(self) -> list[Precision]:
        """Return the precisions that the device computes in natively, fp32 first."""
        names = [name for name in list_precision_names() if find_format_support(self.described, name).native]
        return [resolve_precision_name(name) for name in sorted(names, key=lambda name: name != "fp32")]

    def chosen(self) -> Precision:
        """Return the precision that `auto` chooses."""
        return choose_precision(device=self.device).precision


@dataclass(frozen=True)
class PartResult:
    """The end of a part that passed: a few words for the table, and the figures behind them."""

    figure: str
    figures: Mapping[str, object] = field(default_factory=dict)


def require(holds: bool, otherwise: str) -> None:
    """Raise PartFailed with the words of `otherwise`, unless it holds."""
    if not holds:
        raise PartFailed(otherwise)
