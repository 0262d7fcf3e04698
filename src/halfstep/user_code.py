"""Find the line of the user's code that is running: the innermost one outside of torch, Python and halfstep."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import torch

HALFSTEP = str(Path(__file__).parent) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
NO_FILE = "<"
"""The first character of the file name of code that is in no file, such as `<string>`."""
CELLS = ("<ipython-input-", "<python-input-")
"""File names of IPython and of Python's prompt: linecache has their lines."""
ASKS = (HALFSTEP + "step" + os.sep, os.path.join(HALFSTEP, "guard", "diagnosis") + os.sep)
"""Code that runs a loss function: frames outside of these, such as the main program, did not request the operation."""
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_NOT_THEIRS = (HALFSTEP, TORCH)
_PYTHONS = sysconfig.get_path("stdlib") + os.sep


def find_running_line(innermost: FrameType | None = None) -> str | None:
    """Return `file:line` of the running user code; None if there is none, as in backward.

    `innermost` is the frame of another thread, where the caller's is not meant.
    """
    frame: FrameType | None = innermost or sys._getframe(1)
    # Up to the start of the autograd engine: frames outside of it did not request the operation.
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        file = frame.f_code.co_filename
        if file.startswith(ASKS):
            return None
        if is_user_or_package(file):
            return f"{shorten_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def find_user_frame() -> FrameType | None:
    """Return the innermost frame of the user's code; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_or_package(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_user_or_package(file: str) -> bool:
    """Return whether a file is the user's or an installed package's; timm's models count as what the user runs."""
    if file.startswith(NO_FILE):
        return file.startswith(CELLS)
    return not file.startswith(_NOT_THEIRS) and (file.startswith(_PACKAGES) or not file.startswith(_PYTHONS))


def is_user_file(file: str) -> bool:
    """Return whether a file is the user's own to change, and not of an installed package."""
    return is_user_or_package(file) and not file.startswith(_PACKAGES)


def find_functions(place: str) -> list[FunctionType]:
    """Return the innermost named function around `file:line`, as often as its def has run; not a method or a loop."""
    file, _, line = place.rpartition(":")
    if not file or not line.isdigit():
        return []
    # The collector does not list what `gc.freeze()` was called on, and modules do not list nested functions.
    globals_ = [
        thing for module in list(sys.modules.values()) for thing in list(getattr(module, "__dict__", {}).values())
    ]
    wrapped = [thing.__dict__.get("__wrapped__") for thing in globals_ if type(thing) is FunctionType]
    functions = {id(thing): thing for thing in (*globals_, *wrapped, *gc.get_objects()) if type(thing) is FunctionType}
    around = [
        function
        for function in functions.values()
        if function.__code__.co_filename.endswith(file)
        and shorten_path(function.__code__.co_filename) == file
        and function.__code__.co_firstlineno <= int(line) <= _find_last_line(function.__code__)
    ]
    first = max((function.__code__.co_firstlineno for function in around), default=0)
    found = [function for function in around if function.__code__.co_firstlineno == first]
    return found if all(map(_is_plain_function, found)) else []


def _find_last_line(code: CodeType) -> int:
    return max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)


def _is_plain_function(function: FunctionType) -> bool:
    """Return whether a function has a name in its scope, and is neither a method nor a loop, which calls backward."""
    is_method = "self" in function.__code__.co_varnames[:1]
    is_lazy = function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    return function.__name__.isidentifier() and not (is_method or is_lazy or "backward" in function.__code__.co_names)


def shorten_path(file: str) -> str:
    """Return a file's path relative to the working directory or to the package folder that it is in."""
    for folder in (*_PACKAGES, os.getcwd() + os.sep):
        if file.startswith(folder):
            return file[len(folder) :]
    return file


def warn_user(text: str) -> None:
    """Emit a warning at the innermost line of the user's own code, also below the loop of another library.

    Without one, as in `python -c`, at the innermost line outside of halfstep, torch and Python.
    """
    frames = list(traceback.walk_stack(sys._getframe(1)))
    files = [frame.f_code.co_filename for frame, _ in frames]
    outside = [level for level, file in enumerate(files) if not file.startswith((HALFSTEP, TORCH, _PYTHONS))]
    own = [level for level, file in enumerate(files) if is_user_file(file)]
    warnings.warn(text, stacklevel=2 + next(iter(own or outside), 0))


MEASURING = (TORCH, *(str(Path(HALFSTEP) / floor) for floor in ("measure", "observe", "precision")))
"""Code around the user's or a task's while a step is traced on fake tensors."""

Line = traceback.FrameSummary


def list_lines_outside(error: BaseException, *folders: str) -> list[Line]:
    """Return the lines of a traceback that are outside of `folders`, the innermost last."""
    return [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(folders)]


def find_running_line_outside(*folders: str) -> Line | None:
    """Return the innermost line that is running outside of `folders`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*folders, NO_FILE)):
            return Line(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def format_line_place(line: Line) -> str:
    """Return a line as `file:line`."""
    return f"{line.filename}:{line.lineno}"


def format_line_with_text(line: Line) -> str:
    """Return a line as `file:line: text`, with the text where it can be read."""
    return f"{format_line_place(line)}: `{line.line}`" if line.line else format_line_place(line)
