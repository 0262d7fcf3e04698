"""What the tests of direct calls share: which functions of torch a call runs, and a copy to compare with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor


def list_functions(call: Callable[[], object]) -> set[str]:
    """Return the names of the Python functions that a call runs in this thread."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def have_same_bits(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.detach().nan_to_num(7.0), b.detach().nan_to_num(7.0))
    if isinstance(a, dict):
        return list(a) == list(b) and all(have_same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(have_same_bits, a, b))
    return bool(a == b)
