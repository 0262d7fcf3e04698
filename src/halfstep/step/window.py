"""Windows: the micro-batches of one update, and the order of calls in the context form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from halfstep.errors import WrongUse
from halfstep.step.optimizer_slot import OptimizerSlot


class Window(list[Any]):
    """The micro-batches of one step. A separate type, so that a batch that is a list is not mistaken for a window.

    Args:
        microbatches: The micro-batches.
        of: The windows of the epoch that it belongs to.
    """

    def __init__(self, microbatches: Iterable[Any] = (), *, of: windows | None = None) -> None:
        super().__init__(microbatches)
        self.of = of

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and files have the micro-batches, and not the loader.
        return Window, (list(self),)


class windows:
    """Group a loader's batches into windows of micro-batches.

    The last window may be short, and is averaged over its own length. `len()` is the number of updates of an epoch,
    such as for a schedule: `total_steps = epochs * len(windows(loader, 4))`.

    Args:
        loader: An iterable of batches.
        microbatches: The number of batches in a window.
        drop_last: Leave out a last window that is short.

    Raises:
        WrongUse: `microbatches` is below 1.
    """

    def __init__(self, loader: Iterable[Any], microbatches: int, *, drop_last: bool = False) -> None:
        if microbatches < 1:
            raise WrongUse(f"windows of {microbatches} micro-batches", allowed="1 or more", do="windows(loader, 4)")
        self.loader, self.microbatches, self.drop_last = loader, microbatches, drop_last

    def __len__(self) -> int:
        batches = len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as in torch
        return batches // self.microbatches if self.drop_last else -(-batches // self.microbatches)

    def __iter__(self) -> Iterator[Window]:
        window = Window(of=self)
        for batch in self.loader:
            window.append(batch)
            if len(window) == self.microbatches:
                yield window
                window = Window(of=self)
        if window and not self.drop_last:
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

    def check_forward(self, names: list[str]) -> None:
        """Raise WrongUse if a forward pass for these optimizers is out of order."""
        if self._forwards > self._backwards:
            raise _build_order_error("forward() before backward() of the last micro-batch")
        if self._forwards and self._last:
            # The next window would otherwise include the gradients and the buffers of one that a loop has left.
            raise _build_order_error(
                "forward() after the last micro-batch of a window that is neither applied nor discarded",
                do="call stepper.apply() for the update, or stepper.discard() instead of optimizer.zero_grad() to drop "
                "the window; pass last=False for each micro-batch before the last one",
            )
        if self._forwards and names != self._names:
            raise _build_order_error(f"forward() for {names} in a window for {self._names}")

    def forward(self, *, last: bool, names: list[str]) -> None:
        """Record a forward pass."""
        self._names, self._last = names, last
        self._forwards += 1

    def check_backward(self) -> None:
        """Raise WrongUse if a backward pass is out of order."""
        if self._forwards == self._backwards:
            raise _build_order_error("backward() before forward()")

    def backward(self, slots: Sequence[OptimizerSlot]) -> None:
        """Record a backward pass, and how it left weights and gradients, so that changes by other code are noticed."""
        self._backwards += 1
        # Version counters, so that no tensor is read; and ids, because a gradient may be replaced.
        self._weights, self._gradients = _list_versions(slots)

    @property
    def is_single(self) -> bool:
        """Whether the window has one forward pass so far, and no more may follow; also in the function form."""
        return self._forwards == 0 or (self._forwards == 1 and self._last)

    @property
    def adds_up(self) -> bool:
        """Whether the window has gradients that the next backward pass adds to."""
        return self._backwards > 0

    def moved(self, slots: Sequence[OptimizerSlot]) -> tuple[bool, bool]:
        """Return whether weights, and whether gradients, were written since the last backward pass."""
        weights, gradients = _list_versions(slots)
        return weights != self._weights, gradients != self._gradients

    def stepped(self, slots: Sequence[OptimizerSlot]) -> bool:
        """Return whether an optimizer has written all of its weights with a gradient since the last backward pass.

        Code between two micro-batches may write some of them: it clamps a layer, or copies a target network.
        """
        noted = zip(_list_versions(slots)[0], self._weights, self._gradients, strict=True)
        for slot in slots:
            own = islice(noted, len(slot.gradients.trainable))
            written = [now != before for now, before, gradient in own if gradient != _NO_GRADIENT]
            if written and all(written):
                return True
        return False

    def lost(self, slots: Sequence[OptimizerSlot]) -> bool:
        """Return whether a gradient of the last backward pass was cleared."""
        trained = (p for slot in slots for p in slot.gradients.trainable)
        return any(p.grad is None and had != _NO_GRADIENT for p, had in zip(trained, self._gradients, strict=True))

    def check_apply(self) -> None:
        """Raise WrongUse if the window is not complete."""
        if not self._forwards or self._forwards > self._backwards:
            raise _build_order_error("apply() before forward() and backward()")
        if not self._last:
            # Gradients are synchronized across ranks in the last micro-batch, and only there.
            raise _build_order_error("apply() after forward(last=False)")


_NO_GRADIENT = (0, 0)


def _list_versions(slots: Sequence[OptimizerSlot]) -> tuple[list[int], list[tuple[int, int]]]:
    trained = [p for slot in slots for p in slot.gradients.trainable]
    gradients = [p.grad for p in trained]
    return [p._version for p in trained], [_NO_GRADIENT if g is None else (id(g), g._version) for g in gradients]


_MISSING_CALL = "make the missing call, or call stepper.discard() to drop the window"


def _build_order_error(given: str, do: str = _MISSING_CALL) -> WrongUse:
    return WrongUse(
        given,
        allowed="forward() and backward(loss) for each micro-batch, with last=True for the last one, then apply()",
        do=do,
    )
