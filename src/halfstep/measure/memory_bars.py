"""Draw the memory of an update as bars: predicted in parts, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from halfstep import numbers
from halfstep.page import Bar, BarPiece, Bars, is_drawable

PARTS = (
    "weights", "buffers", "average", "optimizer", "gradients", "cast copies", "batch", "activations", "temporary",
)  # fmt: skip
"""The uses of memory in the order in which they are stacked: permanent ones first."""


class MemoryUse(NamedTuple):
    """The memory of one setting: predicted in parts, and measured."""

    name: str
    parts: Mapping[str, float]
    """Predicted bytes of each part at the peak; empty where nothing was predicted."""
    measured: float | None
    """Bytes."""


def select_drawable_parts(use: MemoryUse) -> dict[str, float]:
    """Return the predicted parts that can be drawn, in the order of `PARTS`."""
    return {part: size for part in PARTS if is_drawable(size := use.parts.get(part, 0.0)) and size > 0}


def draw_memory_bars(uses: Sequence[MemoryUse], title: str) -> Bars:
    """Return a stacked bar for each prediction, and the measured one below it, all on one axis."""
    bars = []
    for use in uses:
        parts = select_drawable_parts(use)
        if parts:
            pieces = tuple(
                BarPiece(part, size, f"{part}: {numbers.format_bytes(size)}") for part, size in parts.items()
            )
            bars.append(Bar(f"{use.name}, predicted", numbers.format_bytes(sum(parts.values())), pieces))
        if use.measured is not None and is_drawable(use.measured):
            words = numbers.format_bytes(use.measured)
            bars.append(
                Bar(f"{use.name}, measured", words, (BarPiece("measured", use.measured, f"measured: {words}"),))
            )
    return Bars(title, tuple(bars), "predicted in parts, and measured")
