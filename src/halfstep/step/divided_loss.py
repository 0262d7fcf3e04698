"""Find a loss that a loop divides by the number of micro-batches, although the step takes the mean over them."""

from __future__ import annotations

import ast
import functools
import linecache
import math
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from halfstep.finding import Finding
from halfstep.user_code import is_user_or_package, shorten_path


class DividedLosses:
    """The numbers by which the losses of one window were divided."""

    def __init__(self) -> None:
        self._factors: list[tuple[bool, Tensor] | None] = []
        self.reported = False

    def begin(self) -> None:
        """Reset for a new window."""
        self._factors.clear()

    def note(self, loss: Any) -> None:
        """Note the number by which the loss of one micro-batch was divided last."""
        # Before backward, which frees them; read after the window, because an observer records each read.
        self._factors.append(_find_last_factor(loss))

    @property
    def many(self) -> int:
        """The number of micro-batches."""
        return len(self._factors)

    @property
    def is_suspicious(self) -> bool:
        """Whether all losses of the window were divided by the number of its micro-batches, for the first time."""
        many = len(self._factors)
        if many < 2 or self.reported or any(factor is None for factor in self._factors):
            return False
        return all(_read_divisor(*factor) == many for factor in self._factors if factor is not None)

    def find(self, line: str) -> list[Finding]:
        """Return the finding for such a window, once."""
        many, self.reported = self.many, True
        return [
            Finding(
                "loss.divided_twice",
                "warning",
                f"each of the {many} losses of this window is divided by {many}{f' at {line}' if line else ''}, and "
                f"the step takes their mean: gradients are {many} times too small",
                "pass the undivided loss of each micro-batch",
            )
        ]


def _find_last_factor(loss: Any) -> tuple[bool, Tensor] | None:
    """Return the number of Python by which the last operation has divided or multiplied a loss, and whether divided."""
    node: Any = loss.grad_fn if isinstance(loss, Tensor) else None
    name = "" if node is None else node.name()
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # saved with a hook, or freed already
        return None
    # A tensor on a device is not read.
    is_number = isinstance(other, Tensor) and not other.ndim and other.device.type == "cpu" and not other.requires_grad
    return (name == "DivBackward0", other) if is_number else None


def _read_divisor(divided: bool, factor: Tensor) -> float:
    value = float(factor)
    if divided or not value or not math.isfinite(1.0 / value):
        return value
    # 1 / 3 is no exact number.
    return float(round(1.0 / value)) if abs(1.0 / value - round(1.0 / value)) < 1e-6 else 1.0


def find_division(many: int, code: CodeType | None, frame: FrameType | None) -> str:
    """Return `file:line` of the division by `many` in a loss function, or in the loop around a call."""
    if code is None and frame is not None:
        code = frame.f_code
    if code is None or not is_user_or_package(code.co_filename):
        return ""
    called = frame.f_lineno if frame is not None else None
    lines = [line for line, right in _list_divisions(code) if called is None or line <= called]
    known = {} if frame is None else {**frame.f_globals, **frame.f_locals}
    exact = [
        line
        for line, right in _list_divisions(code)
        if (called is None or line <= called) and _evaluate(right, known) == many
    ]
    line = (exact or lines or ([called] if called is not None else [code.co_firstlineno]))[-1]
    return f"{shorten_path(code.co_filename)}:{line}"


@functools.lru_cache(maxsize=8)
def _list_divisions(code: CodeType) -> list[tuple[int, ast.expr]]:
    """Return the line and the divisor of each division in a function, or in a script outside of its functions."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return []
    own = {line for _, _, line in code.co_lines()}
    found = [
        (node.lineno, node.right if isinstance(node, ast.BinOp) else node.value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div) and node.lineno in own
    ]
    return sorted(found, key=lambda pair: pair[0])


def _evaluate(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return the value of a name, a constant or an attribute, without calling anything of a loop."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_evaluate(node.value, known), "__dict__", {}).get(node.attr)
    return None
