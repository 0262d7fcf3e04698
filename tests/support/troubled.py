"""Tasks of milliseconds whose steps go wrong, each for a reason of its own, and runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.runs import fit as _fit
from halfstep.train.loop import Loop
from halfstep.train.run import Run
from tests.support.tiny_task import Tiny

SETTINGS: dict[str, Any] = {
    "task": "tiny",
    "precision": "fp16",
    "loss_scale.init_scale": 256.0,
    "data.samples": 96,
    "model.width": 8,
    "optimizer.lr": 0.01,
    "schedule.name": "constant",
    "train.steps": 36,
    "train.batch_size": 8,
    "train.num_workers": 0,
    "train.seed": 11,
    "checkpoint.every_steps": 5,
    "checkpoint.background": False,
    "run.log_every": 3,
    "run.pictures": 0,
}
"""Three epochs of twelve steps."""


class Large(nn.Module):
    """Between its two operations are numbers that fp16 does not have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        with torch.no_grad():
            self.up.weight.mul_(1e6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x) * 1e-6
        return out


class InOneModule(Tiny):
    """Cured by an island."""

    def model(self) -> nn.Module:
        width = self.recipe.model.width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), Large(width), nn.Dropout(0.1), nn.Linear(width, 1))


class InTheLoss(Tiny):
    """Cured by another precision: there is no module to make an island of."""

    def model(self) -> nn.Module:
        width = self.recipe.model.width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        out = model(batch["x"])
        return ((out * 1e6 / 1e6).float() - batch["y"]).square().mean()


def fit(folder: Path, task: Any = Tiny, *, accept: bool = False, **settings: Any) -> Run:
    """A run in `folder/run`, or what is left of it."""
    folder.mkdir(exist_ok=True)
    recipe = folder / "troubled.yaml"
    recipe.write_text("task: tiny\n")
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    given = {**SETTINGS, "run.dir": str(folder / "run"), **changed}
    return halfstep.fit(recipe, task=task, settings=given, quiet=True, accept_recipe_change=accept)


@contextmanager
def every_loop(change: Callable[[Loop], object]) -> Iterator[None]:
    """Loops that are built inside are changed before their first step."""
    make_loop = _fit.make_loop

    def built(*given: Any, **more: Any) -> Loop:
        loop = make_loop(*given, **more)
        change(loop)
        return loop

    _fit.make_loop = built
    try:
        yield
    finally:
        _fit.make_loop = make_loop


def before_steps(loop: Loop, act: Callable[[], object]) -> None:
    """Something that is done before each step of a loop."""
    step = loop.take_step

    def acting(*given: Any, **more: Any) -> Any:
        act()
        return step(*given, **more)

    loop.take_step = acting  # type: ignore[method-assign]


def rate_times(factor: float, since: int) -> Callable[[Loop], None]:
    """The learning rate is so many times too high from an attempt on, whatever the schedule says."""

    def change(loop: Loop) -> None:
        usual = loop.parts.optimizer.param_groups[0]["lr"]

        def raise_it() -> None:
            if loop.stepper.counts.attempted + 1 >= since:
                for group in loop.parts.optimizer.param_groups:
                    group["lr"] = usual * factor

        before_steps(loop, raise_it)

    return change
