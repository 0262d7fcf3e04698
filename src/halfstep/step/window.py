"""Micro-batches that make one update together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from halfstep.errors import WrongUse


class Window(list[Any]):
    """The micro-batches of one step. A type of its own, so that a batch which is a list stays a batch."""


def windows(loader: Iterable[Any], microbatches: int) -> Iterator[Window]:
    """Group a loader's batches into windows; the last may be short, and is divided by its own length."""
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
