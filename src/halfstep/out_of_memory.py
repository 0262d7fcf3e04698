"""Recognize out-of-memory errors, in one place."""

from __future__ import annotations

import traceback

import torch

from halfstep.errors import OutOfMemory, in_one_line

_ON_CORES = "DefaultCPUAllocator: can't allocate memory"
_CUDA_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation, which is also hipErrorOutOfMemory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory was exhausted, whichever type torch raised for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_MEMORY_ALLOCATION
    # For host memory torch raises a plain RuntimeError without a code, so only the message tells it from others.
    return type(error) is RuntimeError and _ON_CORES in str(error)


def tells_of_memory(words: str) -> bool:
    """Return whether the error of another rank, in one line, means that its memory was exhausted."""
    return "OutOfMemoryError: " in words or "MemoryError: " in words or _ON_CORES in words


def as_error(error: BaseException, doing: str, do: str) -> OutOfMemory | None:
    """Return the OutOfMemory error to raise instead, or None if `error` is another failure.

    `doing` and `do` are parts of its message. The frames of the failed call are cleared, and with them the tensors that
    they hold.
    """
    if isinstance(error, OutOfMemory):
        return error
    if not is_out_of_memory(error):
        return None
    # The handler of the error needs the memory that the failed call's local variables still hold.
    traceback.clear_frames(error.__traceback__)
    what = f"out of memory {doing}".strip()
    return OutOfMemory(f"{what}: {in_one_line(error)}", allowed="work that fits into the memory", do=do)
