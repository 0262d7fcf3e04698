"""One optimizer of a GradScaler, and the calls that are refused for it, each by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep.adapters.scaled_backward import Version, collect_gradient_versions
from halfstep.errors import WrongUse
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.report import StepReport


class ScalerSlot(OptimizerSlot):
    """One optimizer that was given to a scaler: this window's gradients, and the decision on them."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(name, optimizer)
        self.attempted = self.applied = 0
        self.awaits = False
        """Whether this window's gradients were unscaled, and not yet decided on."""
        self.unscaled = False
        """Whether these gradients have their true size; fused optimizers unscale in their kernel."""
        self.verdict: StepReport | None = None
        """The decision on this window, once there is one."""
        self._judged: dict[int, Version] = {}

    @property
    def key(self) -> int:
        """The key of this optimizer in torch's own records."""
        return id(self.optimizer)

    def norm_now(self, *, squared: bool) -> Tensor:
        """Return the norm of the gradients as they are, or this rank's share of its square; the host does not wait.

        Of the gradients that the optimizer would get, after the loop's own clipping: one parameter of another optimizer
        whose gradient is NaN makes a common clipping norm NaN, and all gradients.
        """
        self.gradients.collect()  # unscaling may have replaced a sparse gradient
        return self.gradients.squared_share() if squared else self.gradients.norm()

    def note_judged(self) -> None:
        """Note the gradients that the last decision was about."""
        # Only written ones: of a fresh gradient, the next one may have the identity and the version.
        self._judged = {key: v for key, v in collect_gradient_versions(self.gradients.parameters).items() if v[1] > 0}

    def was_judged(self) -> bool:
        """Return whether the gradients are those that the last decision was about."""
        return (
            bool(self._judged) and self._judged.items() <= collect_gradient_versions(self.gradients.parameters).items()
        )

    def call(self, scaler: torch.amp.GradScaler, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
        """Step the optimizer, and give a fused one what torch's own scaler gives it."""
        optimizer: Any = self.optimizer
        scale = scaler._get_scale_async()
        result: float | None
        if scale is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            result = optimizer.step(*args, **kwargs)
            return result
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            kwargs = {**kwargs, "grad_scaler": scaler}
        with _set_fused_arguments(optimizer, scale, unscaled=self.unscaled):
            result = optimizer.step(*args, **kwargs)
        return result

    # -- refused ------------------------------------------------------------------------------------------------

    def check_turn(self, call: str, stage: OptState | None, *, asked: bool) -> None:
        """Raise WrongUse for a second call in one window, and for one without a scaled loss."""
        if stage is OptState.UNSCALED:
            raise WrongUse(
                f"{call}() for {self.name}, whose gradients are already unscaled in this window",
                allowed="one unscale_() for each optimizer between two calls of update()",
                do="unscale_() after the last micro-batch only, and update() after every step()",
            )
        if stage is OptState.STEPPED:
            raise WrongUse(
                f"{call}() for {self.name} after its step(), without update() between them",
                allowed="scale, backward, unscale_, step for each optimizer, and then one update()",
                do="scaler.update() at the end of every iteration, also of a skipped one",
            )
        if not asked:
            raise WrongUse(
                f"{call}() for {self.name} without scale() since the last update()",
                allowed="gradients of a scaled loss: these would be divided by a scale they do not have",
                do="scaler.scale(loss).backward() instead of loss.backward()",
            )

    def check_gradients(self, written: Sequence[Tensor]) -> None:
        """Raise WrongUse if other code wrote some of the gradients, or if there are none."""
        if written:
            raise WrongUse(
                f"{len(written)} of {len(self.gradients.parameters)} gradients of {self.name} were written between "
                "backward and unscale_(), where they carry the loss scale: by clipping, or by a backward that was not "
                "scaled",
                allowed="gradients as backward left them",
                do="scaler.unscale_(optimizer) before clip_grad_norm_; after your own sum or mean over ranks, "
                "scaler.accept_gradients(optimizer)",
            )
        if all(p.grad is None for p in self.gradients.parameters):
            raise WrongUse(
                f"no parameter of {self.name} has a gradient",
                allowed="at least one parameter that the loss depends on",
                do="build the optimizer from the trained parameters (after wrapping or freezing the model)",
            )

    def check_closure(self, given: Sequence[Any]) -> None:
        """Raise WrongUse for a closure, as LBFGS needs one."""
        if any(callable(argument) for argument in given):
            raise WrongUse(
                f"a closure for {self.name}, which computes gradients that nothing unscales",
                allowed="step(optimizer) after backward",
                do="an optimizer other than LBFGS, or a loop without a scaler",
            )

    def stepped_beside(self) -> WrongUse:
        """Return the error for a step of the optimizer that the scaler did not make."""
        return WrongUse(
            f"{self.name}.step() was called directly, on gradients of a scaled loss",
            allowed="scaler.step(optimizer), once between two calls of update(); nothing was applied by this call",
            do="remove optimizer.step() from the loop; for a loss without scale(), call zero_grad() and backward first",
        )


@contextmanager
def _set_fused_arguments(optimizer: Any, scale: Tensor, *, unscaled: bool) -> Iterator[None]:
    own = getattr(optimizer, "grad_scale", None)
    # As in torch: the product, if the optimizer has its own factor.
    optimizer.grad_scale = own if unscaled else scale * (1 if own is None else own)
    optimizer.found_inf = torch.zeros_like(scale)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def build_empty_update_error() -> WrongUse:
    """Return the error for an update() that nothing came before."""
    return WrongUse(
        "update() without step() or unscale_() since the last one: the scale would change inside a window, or "
        "optimizer.step() was called instead of scaler.step(optimizer)",
        allowed="scaler.step(optimizer) for each optimizer, and then one update()",
        do="move update() next to step(), after the last micro-batch",
    )
