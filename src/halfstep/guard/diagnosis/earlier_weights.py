"""The weights from before the last update, with which a diagnosis reruns a step that fails early in a run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep import distributed
from halfstep.observe.nonfinite_origin import compute_norm
from halfstep.step.experiment.rerun import OtherWeights
from halfstep.step.optimizer_slot import stack_numbers
from halfstep.step.stepper import Stepper

EARLY = 20
"""The updates of a run before which weights are copied: a learning rate that is far too high fails within them."""
MOST_PARAMETERS = 1_000_000_000
"""The number of parameters above which no copy is made."""


class WeightsBeforeUpdate:
    """One copy of the trained weights, made before each of the first updates and dropped after them."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._applied = -1
        self._left: tuple[list[Tensor], Tensor] | None = None
        """The trained weights after the last update, with their norms."""

    @property
    def bytes(self) -> int:
        """The memory of the copy."""
        return sum(copy.nbytes for _, copy in self._copies)

    def take_if_early(self) -> None:
        """Copy the weights; call it before each update."""
        if self._stepper.counts.applied >= EARLY:
            self._copies = []
            return
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        stepper = self._stepper
        trained = [p for slot in stepper.slots.values() for p in slot.gradients.trainable]
        too_many = sum(p.numel() for p in trained) > MOST_PARAMETERS
        if too_many or stepper.weights is not None or distributed.is_sharded(trained):
            self._copies = []
            return
        if [id(p) for p in trained] != [id(p) for p, _ in self._copies]:
            self._copies = [(p, p.detach().clone()) for p in trained]
        else:
            torch._foreach_copy_([copy for _, copy in self._copies], [p.detach() for p in trained])
        self._applied = stepper.counts.applied

    def note_result(self) -> None:
        """Note the norms of the weights after an early update, so that writes by other code are noticed."""
        self._left = None
        if self._stepper.counts.applied <= EARLY:
            self._note_norms()

    @torch.no_grad()
    def _note_norms(self) -> None:
        stepper = self._stepper
        if stepper.weights is None:
            trained = [p for slot in stepper.slots.values() for p in slot.gradients.trainable]
            if not distributed.is_sharded(trained):
                self._left = trained, _list_norms(trained)

    @property
    def is_untouched(self) -> bool:
        """Whether the weights are those that the last update left; reads the device."""
        return self._left is not None and torch.equal(_list_norms(self._left[0]), self._left[1])

    def of_last_update(self) -> OtherWeights:
        """Return the weights from before the last applied update; nothing if they are not known."""
        same = self._stepper.counts.applied == self._applied + 1
        fits = all(p.shape == copy.shape and p.dtype == copy.dtype for p, copy in self._copies)
        return self._copies if same and fits else ()


def _list_norms(weights: list[Tensor]) -> Tensor:
    return stack_numbers([norm.float() for norm in torch._foreach_norm([p.detach() for p in weights])])


def measure_update(weights: OtherWeights) -> float:
    """Return the change of the weights since then, as a part of their norm; infinity if one is not finite now."""
    before = math.hypot(*(compute_norm(copy) for _, copy in weights))
    change = math.hypot(*(compute_norm(p.detach() - copy) for p, copy in weights))
    if not math.isfinite(change):
        return math.inf
    return change / before if before else math.inf
