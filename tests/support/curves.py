"""Curves of runs that tests train: drawn where a test looks at them, and left out elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halfstep.journal.curves import CurvesListener

_DRAW = CurvesListener._draw


def leave_out() -> None:
    """Draw no curves from now on: two pictures a run are 72 % of what a run of milliseconds takes."""
    _set(lambda self: setattr(self, "_is_drawn", True))


@contextmanager
def drawn() -> Iterator[None]:
    """Draw curves inside the context, as a run of a person does."""
    before = CurvesListener._draw
    _set(_DRAW)
    try:
        yield
    finally:
        _set(before)


def _set(draw: Any) -> None:
    CurvesListener._draw = draw  # type: ignore[method-assign]
