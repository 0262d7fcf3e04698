"""The line of a person's code that is running: the innermost one that is neither torch's, nor Python's, nor ours."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

HALFSTEP = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
NO_FILE = "<"
"""How the name of code begins that is in no file."""
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_NOT_THEIRS = (HALFSTEP, TORCH, NO_FILE)
_PYTHONS = sysconfig.get_path("stdlib") + os.sep


def running_line() -> str | None:
    """`file:line`; None where no person's code is being run, as in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _enters_backward(frame):
        file = frame.f_code.co_filename
        if is_theirs(file):
            return f"{shown(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_theirs(file: str) -> bool:
    """A model of timm's counts as theirs: it is what they run."""
    return not file.startswith(_NOT_THEIRS) and (file.startswith(_PACKAGES) or not file.startswith(_PYTHONS))


def is_own(file: str) -> bool:
    """Theirs to change: not of a package that they installed."""
    return is_theirs(file) and not file.startswith(_PACKAGES)


def shown(file: str) -> str:
    """A file as people know it: from where they are, or from the package that it belongs to."""
    for folder in (*_PACKAGES, os.getcwd() + os.sep):
        if file.startswith(folder):
            return file[len(folder) :]
    return file


def _enters_backward(frame: FrameType) -> bool:
    """What lies outside of a call of backward did not ask for the operation; it only began the walk."""
    return frame.f_code.co_name == "_engine_run_backward"
