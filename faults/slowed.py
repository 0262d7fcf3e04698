"""Steps, evaluations, starts and saves that take their time, so that something can happen in the middle of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep.checkpoint.paths import DRAFT, Disk
from tests.support.tiny_task import Tiny

STEP = 0.02
"""Seconds; a save of the small run takes a tenth of it."""


class SlowSteps(Tiny):
    """Pauses change no number."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        time.sleep(STEP if model.training else 0.0)
        return super().loss(model, batch, metrics)


class SlowEvaluation(SlowSteps):
    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        if not model.training:
            marker(self.recipe.run.dir).touch()
            time.sleep(0.1)
        return super().loss(model, batch, metrics)


class SlowStart(SlowSteps):
    def model(self) -> nn.Module:
        marker(self.recipe.run.dir).touch()
        time.sleep(0.3)
        return super().model()


def marker(folder: str | Path) -> Path:
    """A file beside a run's folder: what was made slow has begun."""
    return Path(f"{folder}.begun")


class SlowDisk(Disk):
    """Every save begins with `seconds` of nothing, from the given one on, counted from 1; whatever brings bytes to the
    disk takes `each` longer, so that a save is long in all of its parts."""

    def __init__(self, seconds: float = 0.0, first: int = 1, *, each: float = 0.0) -> None:
        self._seconds, self._left, self._each = seconds, first, each

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        if path.name.endswith(DRAFT):
            self._left -= 1
            time.sleep(self._seconds if self._left <= 0 else 0.0)

    def write(self, file: int, content: bytes | memoryview) -> None:
        time.sleep(self._each)
        super().write(file, content)

    def flush(self, file: int) -> None:
        time.sleep(self._each)
        super().flush(file)

    def flush_folder(self, path: Path) -> None:
        time.sleep(self._each)
        super().flush_folder(path)
