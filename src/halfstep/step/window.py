"""Windows: the micro-batches of one update, and the order of calls in the context form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from halfstep.errors import WrongUse
from halfstep.step.optimizer_slot import OptimizerSlot


class Window(list[Any]):
    """The micro-batches of one step. A separate type, so that a batch that is a list is not mistaken for a window."""


def windows(loader: Iterable[Any], microbatches: int) -> Iterator[Window]:
    """Group a loader's batches into windows of micro-batches.

    The last window may be short, and is averaged over its own length.

    Args:
        loader: An iterable of batches.
        microbatches: The number of batches in a window.

    Returns:
        An iterator over the windows.

    Raises:
        WrongUse: `microbatches` is below 1.
    """
    if microbatches < 1:
        raise WrongUse(f"windows of {microbatches} micro-batches", allowed="1 or more", do="windows(loader, 4)")
    window = Window()
    for batch in loader:
        window.append(batch)
        if len(window) == microbatches:
            yield window
            window = Window()
    if window:
        yield window


# Check the order of calls in the context form: forward and backward alternate, then apply, after a last one.


class CallOrder:
    """A check of the call order, which refuses a call out of order before it does anything."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Reset after the window was applied, skipped or dropped."""
        self._names: list[str] = []
        self._forwards = self._backwards = 0
        self._last = False
        self._weights: list[int] = []
        self._gradients: list[tuple[int, int]] = []

    def forward(self, *, last: bool, names: list[str]) -> None:
        """Record a forward pass, or raise WrongUse if it is out of order."""
        if self._forwards > self._backwards:
            raise _build_order_error("forward() before backward() of the last micro-batch")
        if self._forwards and names != self._names:
            raise _build_order_error(f"forward() for {names} in a window for {self._names}")
        self._names, self._last = names, last
        self._forwards += 1

    def backward(self) -> None:
        """Record a backward pass, or raise WrongUse if it is out of order."""
        if self._forwards == self._backwards:
            raise _build_order_error("backward() before forward()")
        self._backwards += 1

    def note(self, slots: Sequence[OptimizerSlot]) -> None:
        """Record how backward left weights and gradients, so that changes by other code are noticed."""
        # Version counters, so that no tensor is read; and ids, because a gradient may be replaced.
        self._weights, self._gradients = _list_versions(slots)

    def moved(self, slots: Sequence[OptimizerSlot]) -> tuple[bool, bool]:
        """Return whether weights, and whether gradients, were written since `note`."""
        weights, gradients = _list_versions(slots)
        return weights != self._weights, gradients != self._gradients

    def apply(self) -> None:
        """Raise WrongUse if the window is not complete."""
        if not self._forwards or self._forwards > self._backwards:
            raise _build_order_error("apply() before forward() and backward()")
        if not self._last:
            # Gradients are synchronized across ranks in the last micro-batch, and only there.
            raise _build_order_error("apply() after forward(last=False)")


def _list_versions(slots: Sequence[OptimizerSlot]) -> tuple[list[int], list[tuple[int, int]]]:
    trained = [p for slot in slots for p in slot.gradients.trainable]
    gradients = [p.grad for p in trained if p.grad is not None]
    return [p._version for p in trained], [(id(g), g._version) for g in gradients]


def _build_order_error(given: str) -> WrongUse:
    return WrongUse(
        given,
        allowed="forward() and backward(loss) for each micro-batch, with last=True for the last one, then apply()",
        do="make the missing call, or call stepper.discard() to drop the window",
    )
