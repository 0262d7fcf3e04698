"""One optimizer's way through a step: its loss, its scale, its gradients, its schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import world
from halfstep.errors import StateMismatch, WrongUse, same_keys, same_presence
from halfstep.formats import FP32, widest
from halfstep.precision.precision import widen
from halfstep.step.gradients import Gradients, clip_factor
from halfstep.step.loss_scale import LossScale
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, LOSS_NOT_FINITE, Part
from halfstep.step.roster import owned_by

Count = float | Tensor


class Lane:
    """Holds what a window accumulates for one optimizer, and decides what becomes of it."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        *,
        scale: LossScale,
        schedule: Any = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        alone: bool = True,
    ) -> None:
        self.name, self.optimizer, self.scale, self.schedule = name, optimizer, scale, schedule
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.alone = alone
        """No other optimizer shares the model, so backward may go wherever it leads."""
        self.gradients = Gradients(owned_by(self.optimizer))
        self.base_count: float | None = None
        """N0: what sums are divided by before backward, so that they fit the format; agreed once, then kept."""
        self.begin()

    def follow(self) -> None:
        """Parameters came, left or were unfrozen."""
        self.gradients = Gradients(owned_by(self.optimizer))

    def begin(self) -> None:
        """Before a window's first micro-batch: what an earlier backward left behind is not part of it."""
        self.gradients.clear()
        self.total: Tensor | None = None
        self.count: Count | None = None
        self.microbatches = 0
        self.divided = 1
        self.loss = self.norm = self.factor = math.nan
        self.spoilt: Tensor | None = None
        """The first parameter whose gradient is not finite, once the window was found to be so."""

    # -- the loss -----------------------------------------------------------------------------------------------

    def scaled(self, loss: Any, divide: int) -> Tensor:
        """What backward runs on, from a loss or from (sum, count). `divide`: micro-batches in the window, if known."""
        if self.microbatches and isinstance(loss, tuple) != (self.count is not None):
            raise _wrong_loss("a loss and a (sum, count) in one window", "the same for every micro-batch of a window")
        if isinstance(loss, tuple):
            value, ready = self._counted(loss, divide)
        else:
            value = ready = _scalar(loss)
            if divide > 1:
                ready = value / divide
        self.microbatches += 1
        self.divided = divide
        seen = value.detach()
        self.total = seen if self.total is None else self.total + seen
        return ready if self.scale.value == 1.0 else ready * self.scale.value

    def _counted(self, loss: tuple[Any, ...], divide: int) -> tuple[Tensor, Tensor]:
        if len(loss) != 2:
            raise _wrong_loss(f"a loss that is a tuple of {len(loss)}", "a loss, or (sum, count)")
        value, count = _scalar(loss[0]), loss[1]
        count = count.detach() if isinstance(count, Tensor) else float(count)
        self.count = count if self.count is None else self.count + count
        return value, value / self._base(_wide(count, value.device), divide)

    def _base(self, count: Tensor, microbatches: int) -> float:
        if self.base_count is None:
            everywhere = world.agree(count).item() * microbatches
            if not 0.0 < everywhere < math.inf:
                return 1.0
            self.base_count = everywhere
        return self.base_count

    # -- what all processes must agree on -----------------------------------------------------------------------

    def numbers(self) -> list[Tensor]:
        """Total loss, norm, and the count where there is one. Summed over processes, NaN and inf stay what they are."""
        if self.total is None or not self.gradients.collect():
            raise _no_gradient(self.name, self.total is not None)
        norm = self.gradients.norm() if world.size() == 1 else self.gradients.squared_share()
        if self.count is None:
            return [self.total, norm]
        return [self.total, norm, _wide(self.count, self.total.device)]

    def read(self, total: float, norm: float, count: float | None = None) -> None:
        """The same numbers, agreed on and on the host: from them the loss, the norm, and what gradients lack."""
        processes = world.size()
        if count is None:
            self.loss = total / self.microbatches / processes
            self.factor = self.divided / self.microbatches / self.scale.value
        else:
            # No element counted means no loss: torch's own mean over nothing is NaN too.
            usable = 0.0 < count < math.inf
            self.loss = total / count if usable else math.nan
            self.factor = processes * (self.base_count or 1.0) / (count if usable else 1.0) / self.scale.value
        self.norm = (norm if processes == 1 else math.sqrt(norm)) * self.factor

    # -- the verdict --------------------------------------------------------------------------------------------

    @property
    def finite(self) -> bool:
        return self.norm <= FP32.largest and math.isfinite(self.loss)

    def reason(self) -> str | None:
        """Why this lane cannot be applied, if it cannot."""
        if not math.isfinite(self.loss):
            return LOSS_NOT_FINITE
        if self.norm <= FP32.largest:
            return None
        self.spoilt = self.gradients.first_not_finite()
        return GRADIENT_OVERFLOW if self.scale.can_fall else GRADIENT_NOT_FINITE

    def part(self) -> Part:
        return Part(self.loss, self.norm, self.scale.value)

    # -- the update ---------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Gradients unscaled and clipped, in one multiplication."""
        clipped = 1.0 if self.clip_norm is None else clip_factor(self.norm, self.clip_norm)
        self.gradients.multiply_(self.factor * clipped)
        if self.clip_value is not None:
            self.gradients.clamp_(self.clip_value)

    def apply(self) -> None:
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def adjust(self) -> None:
        """The scale learns from gradients only: a loss that is not finite says nothing about it."""
        if math.isfinite(self.loss):
            self.scale.update(overflow=not self.norm <= FP32.largest)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "loss_scale": self.scale.state_dict(),
            "base_count": self.base_count,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, and change nothing."""
        ours = self.state_dict()
        same_keys(f"optimizer {self.name!r}", ours, state)
        same_presence("a schedule", "schedule", ours, state)
        saved = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
        held = [len(group["params"]) for group in self.optimizer.param_groups]
        if saved != held:
            raise StateMismatch(
                f"optimizer {self.name!r} was saved with {sum(saved)} parameters in {len(saved)} groups",
                allowed=f"{sum(held)} in {len(held)}",
                do="build the model and the optimizer as they were when they were saved",
            )
        self._check_shapes(state["optimizer"])
        copy.copy(self.scale).load_state_dict(state["loss_scale"])

    def _check_shapes(self, state: Mapping[str, Any]) -> None:
        for index, parameter in enumerate(owned_by(self.optimizer)):
            for name, value in state["state"].get(index, {}).items():
                # Factored or scalar state has other shapes; a full moment has as many dimensions and must fit.
                full = isinstance(value, Tensor) and value.ndim == parameter.ndim > 0 and value.numel() > 1
                if full and any(a not in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True)):
                    raise StateMismatch(
                        f"{name} of parameter {index} was saved with shape {tuple(value.shape)}",
                        allowed=str(tuple(parameter.shape)),
                        do="build the model as it was when it was saved",
                    )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale.load_state_dict(state["loss_scale"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.base_count = state["base_count"]


def _wide(count: Count, device: torch.device) -> Tensor:
    """A count as a tensor that counts exactly, as far as its device can."""
    return torch.as_tensor(count, dtype=widest(device), device=device)


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return widen(loss)
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)}" if loss.ndim else "a number that no parameter has a part in"
    raise WrongUse(
        f"{what} as the loss",
        allowed="a scalar tensor with a graph behind it, (sum, count), or a dict of those where there are several",
        do="return loss.mean(), and call the model outside torch.no_grad()",
    )


def _wrong_loss(given: str, allowed: str) -> WrongUse:
    return WrongUse(given, allowed=allowed, do="return (loss.sum(), number_of_elements), or loss.mean()")


def _no_gradient(name: str, had_loss: bool) -> WrongUse:
    return WrongUse(
        f"no parameter of optimizer {name!r} has a gradient" if had_loss else f"no loss for optimizer {name!r}",
        allowed="at least one parameter that the loss depends on",
        do="build the optimizer from the parameters that are trained (after wrapping or freezing the model)",
    )
