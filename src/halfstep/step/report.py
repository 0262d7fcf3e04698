"""The report of one step, and the interface of guards, which see it before the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from halfstep.page import Page

LOSS_NOT_FINITE = "loss_not_finite"
"""The loss itself is NaN or inf. The loss scale is held: lowering it could not have helped."""
GRADIENT_OVERFLOW = "gradient_overflow"
"""A scaled gradient is non-finite, and the scale is above its floor: a lower scale may remedy it."""
GRADIENT_NOT_FINITE = "gradient_not_finite"
"""A gradient is non-finite, and no loss scale is the cause."""
BUFFER_NOT_FINITE = "buffer_not_finite"
"""Loss and gradients are finite, and a buffer that was finite before is not, such as BatchNorm's statistics."""
GUARD = "guard:"
"""The prefix before the name of the guard that refused the update."""


def parse_guard_name(reason: str | None) -> str | None:
    """Return the name of the guard that refused the update, or None for any other reason."""
    return reason.removeprefix(GUARD) if reason is not None and reason.startswith(GUARD) else None


class OptimizerReport(NamedTuple):
    """One optimizer's share of a step."""

    loss: float
    grad_norm: float
    """Over the optimizer's parameters, unscaled, before clipping."""
    loss_scale: float
    """The scale that this step's backward ran with."""


class StepReport(NamedTuple):
    """One attempted update, in plain numbers: reading it does not synchronize with the device."""

    step: int
    """Updates applied so far, including this one."""
    attempt: int
    """Updates attempted so far, including this one."""
    applied: bool
    reason: str | None
    """Why the step was skipped: one of the reasons above, or None."""
    finite: bool
    loss: float
    """Over all micro-batches and ranks; the sum of the losses if there are several."""
    grad_norm: float
    loss_scale: float
    parts: Mapping[str, OptimizerReport]
    """The same by optimizer name; optimizers that share a loss have the same loss here."""
    aux: Any = None
    """The `aux` of `halfstep.Out`; for a Window, a list with one entry per micro-batch."""
    gradient_format: str = "fp32"
    """The format of the gradients of the weights; bf16 only where the weights are stored in bf16."""

    def __str__(self) -> str:
        what = f"step {self.step} applied" if self.applied else f"skipped: {self.reason}"
        scale = "" if self.loss_scale == 1.0 else f", loss scale {self.loss_scale:g}"
        return f"attempt {self.attempt}: {what}, loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}{scale}"

    def page(self) -> Page:
        """Return the page about it: applied or skipped and why, and the numbers of each optimizer."""
        from halfstep.page import Page, Paragraph, Span, build_number_table  # a loop needs none

        attempt = f"attempt {self.attempt}: "
        what = Span(f"step {self.step} applied", "good")
        if not self.applied:
            what = Span(f"skipped: {str(self.reason).replace('_', ' ')}", "warn")
        every = OptimizerReport(self.loss, self.grad_norm, self.loss_scale)
        parts = {"": every} if len(self.parts) == 1 else {"all": every, **self.parts}
        rows = [(name, f"{n.loss:.6g}", f"{n.grad_norm:.4g}", f"{n.loss_scale:g}") for name, n in parts.items()]
        table = build_number_table("", ("loss", "gradient norm", "loss scale"), rows)
        return Page("one step", (Paragraph((attempt, what)), table))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from halfstep.draw.notebook import build_mimebundle

        return build_mimebundle(self.page(), str(self))


class Guard(Protocol):
    """A check of a step that would be applied; it may refuse it.

    The report is the one that an applied step would return. Its numbers are the same on all ranks, and a guard must use
    only these, so that all ranks make the same decision. A guard with `same_on_all_ranks = True` promises that it
    cannot fail on one rank only; others cost one more collective.
    """

    name: str

    def passes(self, report: StepReport) -> bool: ...
