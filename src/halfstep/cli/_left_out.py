"""A method of the protocol that a task leaves out, told from what torch raises where a device lacks an operation."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


def is_left_out(error: NotImplementedError, method: Callable[..., Any]) -> bool:
    """Whether the protocol's own `method` raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is method.__code__
