"""How a profile says numbers and names."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 4


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(names: Sequence[str]) -> str:
    """Names of modules in quotes; what stands in brackets is no name."""
    more = len(names) - _NAMED
    shown = [name if name.startswith("(") else f'"{name}"' for name in names[:_NAMED]]
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def layers(names: Sequence[str], kind: str) -> str:
    """`layer "2" (Conv2d)`."""
    return f"{'layer' if len(names) == 1 else 'layers'} {listed(names)}" + (f" ({kind})" if kind else "")
