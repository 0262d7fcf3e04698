"""A step is applied completely, or nothing of it: after a NaN, and after an error in the loss function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision.precision import Precision
from halfstep.selftest.part import PartContext, PartFailed, PartResult, require
from halfstep.selftest.small import Batch, build_convolutional_model, compute_classification_loss, create_image_batch
from halfstep.step.ema import Ema
from halfstep.step.report import LOSS_NOT_FINITE
from halfstep.step.stepper import Stepper
from halfstep.step.window import Window

_ATTEMPTS = 30
"""A loss scale in fp16 may have to fall before the first update."""


class _LossRaised(Exception):
    """The error that the loss function raises."""


class _TrainingSetup:
    """A model in training, with everything that an update moves."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device, self.model = device, build_convolutional_model(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.average = Ema(self.model, 0.9)
        self.stepper = Stepper(
            self.model,
            self.optimizer,
            precision=precision,
            clip_norm=1.0,
            schedule=self.schedule,
            ema=self.average,
        )

    def update(self) -> None:
        """Step until an update is applied; raise PartFailed if none is."""
        for _ in range(_ATTEMPTS):
            report = self.stepper.step(compute_classification_loss, create_image_batch(self.device))
            if report.applied:
                return
        raise PartFailed(f"{self.stepper.precision}: no update in {_ATTEMPTS} steps, the last was {report.reason}")

    def state(self) -> dict[str, object]:
        """Return copies of every tensor and number that an update may move."""
        owners = (self.model, self.optimizer, self.schedule, self.average)
        return {
            f"{type(owner).__name__} {name}": value for owner in owners for name, value in _iterate_state_leaves(owner)
        }


def check(place: PartContext) -> PartResult:
    """Check every native precision of the device."""
    precisions = place.native()
    tensors = sum(_check_updates(_TrainingSetup(place.device, precision)) for precision in precisions)
    names = ", ".join(precision.name for precision in precisions)
    return PartResult(f"{tensors} tensors compared in {names}", {"tensors": tensors, "precisions": names})


def _check_updates(trained: _TrainingSetup) -> int:
    name = trained.stepper.precision.name
    before = trained.state()
    trained.update()
    moved = trained.state()
    still = [key for key in before if key.startswith("Sequential") and _is_equal(before[key], moved[key])]
    require(not still, f"{name}: an applied step left {_shorten_names(still)} where it was")
    images, classes = create_image_batch(trained.device)
    spoiled = Window([create_image_batch(trained.device, seed=2), (images * float("nan"), classes)])
    report = trained.stepper.step(compute_classification_loss, spoiled)
    require(report.reason == LOSS_NOT_FINITE, f"{name}: a NaN in the batch ended as {report.reason or 'applied'}")
    _require_unmoved(trained, moved, f"{name}: a skipped step moved")
    try:
        trained.stepper.step(_raise_after_forward, create_image_batch(trained.device, seed=3))
    except _LossRaised:
        _require_unmoved(trained, moved, f"{name}: a step that ended in an error moved")
    else:
        raise PartFailed(f"{name}: an error of the loss function was lost")
    trained.update()
    return sum(isinstance(value, Tensor) for value in moved.values())


def _raise_after_forward(model: nn.Module, batch: Batch) -> Tensor:
    compute_classification_loss(model, batch)  # the forward pass has moved the running statistics by now
    raise _LossRaised


def _require_unmoved(trained: _TrainingSetup, before: Mapping[str, object], otherwise: str) -> None:
    now = trained.state()
    moved = [key for key in {**before, **now} if not _is_equal(before.get(key), now.get(key))]
    require(not moved, f"{otherwise} {_shorten_names(moved)}")


def _shorten_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _iterate_state_leaves(owner: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in torch.utils._pytree.tree_leaves_with_path(owner.state_dict()):
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        yield name, leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)
