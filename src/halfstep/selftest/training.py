"""A run of a second, in a process of its own: `python -m halfstep.selftest.training FOLDER DEVICE PRECISION [STEP]`.

At the given step it says so and waits to be killed. At its end it prints the digests of its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.checkpoint.paths import CHECKPOINTS, generations
from halfstep.checkpoint.reading import read_tensors
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.runs.fit import fit
from halfstep.train.task import Split, Task

STEPS, SAVED_EVERY = 24, 4
WAITING = "waiting"
_SETTINGS: dict[str, object] = {
    "task": "selftest",
    "optimizer.lr": 0.01,
    "schedule.warmup_steps": 3,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.num_workers": 0,
    "train.seed": 11,
    "train.ema": 0.9,
    "checkpoint.every_steps": SAVED_EVERY,
    "run.log_every": 4,
    "run.pictures": 0,
}


class _Points:
    """Points of a plane with a value each."""

    def __init__(self, samples: int, seed: int) -> None:
        self._points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1

    def __len__(self) -> int:
        return len(self._points)

    def read(self, index: int) -> dict[str, Tensor]:
        return {"x": self._points[index], "y": self._points[index].prod(0, keepdim=True).sin()}

    def name(self, index: int) -> str:
        return f"point {index}"


class SelftestTask(Task):
    """A network with statistics and dropout, so that buffers and random numbers count too."""

    schema: ClassVar[Any] = Recipe[ModelOptions, DataOptions, LossOptions]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    wait_at: ClassVar[int] = 0
    steps: ClassVar[int] = 0
    """Training steps of this process."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def source(self, split: Split) -> _Points:
        return _Points(16, 2) if split == "val" else _Points(64, 1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        if model.training:
            type(self).steps += 1
            if self.steps == self.wait_at:
                print(json.dumps({WAITING: self.steps}), flush=True)
                time.sleep(3600)
        return functional.mse_loss(model(batch["x"]), batch["y"])


def main(folder: Path, device: str, precision: str, wait_at: int = 0) -> None:
    """Train in `folder`, or resume there; print the steps that were taken and the digests of the last state."""
    SelftestTask.wait_at = wait_at
    recipe = folder.with_suffix(".yaml")
    recipe.write_text("task: selftest\n", encoding="utf-8")
    settings = {**_SETTINGS, "run.dir": str(folder), "train.device": device}
    fit(recipe, task=SelftestTask, precision=precision, settings=settings, quiet=True)
    last = generations(folder / CHECKPOINTS)[0]
    digests = {name: _digest(tensor) for name, tensor in read_tensors(last, 0).items()}
    print(json.dumps({"steps": SelftestTask.steps, "saved_at": last.attempt, "digests": digests}), flush=True)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())).hexdigest()[:16]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
