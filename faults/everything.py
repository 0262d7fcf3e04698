"""A run of which every part of a checkpoint decides bits: one that comes back without a part comes out otherwise."""

from __future__ import annotations

import functools
import os
import random
import signal
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision, BinaryRecall

import halfstep
from halfstep.runs import fit
from halfstep.step.report import StepReport
from halfstep.train import loaders
from halfstep.train.loop import Loop
from tests.support.tiny_task import Tiny

SETTINGS: dict[str, Any] = {
    "precision": "fp16",
    "loss_scale.init_scale": 4096.0,
    "loss_scale.growth_interval": 3,
    "data.samples": 44,
    "data.nan": [3],
    "data.unreadable": [5, 17],
    "schedule.name": "plateau",
    "schedule.patience": 0,
    "schedule.factor": 0.5,
    "train.steps": 40,
    "train.num_workers": "auto",
    "checkpoint.every_steps": 5,
    "checkpoint.background": False,
    "run.log_every": 1,
}
"""Six steps an epoch, a save every fifth: the fifteenth step is in the middle of the third epoch."""


class Everything(Tiny):
    """Statistics, dropout, random numbers of three kinds, sums with counts, and metrics that share what they count."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def metrics(self) -> MetricCollection:
        counted = {"accuracy": BinaryAccuracy(), "precision": BinaryPrecision(), "recall": BinaryRecall()}
        return MetricCollection({**counted, "auroc": BinaryAUROC()})

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Any:
        x, y = batch["x"], batch["y"]
        out = model(x)
        if metrics is not None:
            metrics.update(out.detach().float().nan_to_num().sigmoid(), (y > 0).long())
        counted = (x[:, :1] > -0.5).to(out)
        weight = 1.0 + 0.2 * random.random() + 0.2 * float(np.random.rand())
        return halfstep.Counted(((out - y).square() * counted).sum() * weight, counted.sum())


class Steady:
    """A guard that compares a loss with those before it, and refuses one that stands out."""

    name = "steady"

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=4)

    def passes(self, report: StepReport) -> bool:
        usual = sum(self.before) / len(self.before) if self.before else report.loss
        self.before.append(report.loss)
        return report.loss <= 1.3 * usual

    def state_dict(self) -> dict[str, Any]:
        return {"before": list(self.before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = deque(state["before"], maxlen=4)


@dataclass(frozen=True)
class Launch:
    """What happens to one launch of the run: whether it is ended, and how; and what a measurement would say to it."""

    end_at: int | None = None
    end: str = "SIGKILL"
    workers: int = 0
    guarded: bool = True

    def __call__(self) -> Callable[[], None]:
        """Break this process, and give what mends it."""
        warnings.simplefilter("ignore")  # fp16 is slow on most processors
        make_loop, choose = fit.make_loop, loaders.choose_workers
        fit.make_loop = functools.partial(self._built, make_loop)
        loaders.choose_workers = lambda *given, **more: (self.workers, "as this test has it")

        def mend() -> None:
            fit.make_loop, loaders.choose_workers = make_loop, choose

        return mend

    def _built(self, make_loop: Callable[..., Loop], *given: Any, **more: Any) -> Loop:
        loop = make_loop(*given, **more)
        if self.guarded:
            loop.stepper.guards.append(Steady())
        record_finished = loop.checkpoints.record_finished

        def ending() -> None:
            """After a step, and after its save where it has one."""
            if loop.progress.attempts == self.end_at:
                os.kill(os.getpid(), signal.Signals[self.end])
            record_finished()

        loop.checkpoints.record_finished = ending  # type: ignore[method-assign]
        return loop
