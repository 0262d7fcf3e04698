"""The order of calls in the context form: forward, backward, in turns; then apply, after a last one."""

from __future__ import annotations

from halfstep.errors import WrongUse


class Turns:
    """Refuses a call that comes out of turn, before it does anything."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """The window was applied, skipped or dropped."""
        self._names: list[str] = []
        self._forwards = self._backwards = 0
        self._last = False

    def forward(self, *, last: bool, names: list[str]) -> None:
        if self._forwards > self._backwards:
            raise _out_of_turn("forward() before backward() of the last micro-batch")
        if self._forwards and names != self._names:
            raise _out_of_turn(f"forward() for {names} in a window for {self._names}")
        self._names, self._last = names, last
        self._forwards += 1

    def backward(self) -> None:
        if self._forwards == self._backwards:
            raise _out_of_turn("backward() before forward()")
        self._backwards += 1

    def apply(self) -> None:
        if not self._forwards or self._forwards > self._backwards:
            raise _out_of_turn("apply() before forward() and backward()")
        if not self._last:
            # Gradients of several processes meet in the last micro-batch, and only there.
            raise _out_of_turn("apply() after forward(last=False)")


def _out_of_turn(given: str) -> WrongUse:
    return WrongUse(
        given,
        allowed="forward() and backward(loss) for each micro-batch, with last=True for the last one, then apply()",
        do="call what is missing, or stepper.discard() to drop what the window holds",
    )
