"""Whose lines an error went through, so that it can be told with the one that its reader wrote."""

from __future__ import annotations

import traceback
from pathlib import Path

from halfstep.observe.code_line import HALFSTEP, NO_FILE, TORCH

__all__ = ["HALFSTEP", "MEASURING", "NO_FILE", "TORCH", "Line", "lines_outside", "place", "place_and_text"]

MEASURING = (TORCH, *(str(Path(HALFSTEP) / floor) for floor in ("measure", "observe", "precision")))
"""What runs round a person's code, or a task's, while a step is followed on tensors that are only described."""

Line = traceback.FrameSummary


def lines_outside(error: BaseException, *folders: str) -> list[Line]:
    """The innermost is the last."""
    return [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(folders)]


def place(line: Line) -> str:
    """As file:line."""
    return f"{line.filename}:{line.lineno}"


def place_and_text(line: Line) -> str:
    """As file:line: its text, where that can be read."""
    return f"{place(line)}: `{line.line}`" if line.line else place(line)
