"""Recognize out-of-memory errors, in one place."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Mapping

import torch

from halfstep.errors import OutOfMemory, format_error_line

_ON_CORES = "DefaultCPUAllocator: can't allocate memory"
_SHARED = (
    *("unable to allocate shared memory", "unable to open shared memory object", "unable to resize file </torch_"),
    *("unable to write to file </torch_", "unable to mmap", "out of shared memory"),
)
"""The words of torch where the shared memory of this host, or of its container, has no room."""
_MANY_FILES = "Too many open files"
_NO_THREAD = "can't start new thread"
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EAGAIN)
"""No room in /dev/shm for a lock, no memory for a process, no process more."""
WITHOUT_WORKERS: Mapping[str, object] = {"train.num_workers": 0}
MORE_SHARED = "give it more shared memory, as docker run --shm-size=2g does"
MORE_THREADS = "raise the limit of processes and threads: ulimit -u, or docker run --pids-limit=-1"
_CUDA_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation, which is also hipErrorOutOfMemory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory was exhausted, whichever type torch raised for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_MEMORY_ALLOCATION
    # For host memory torch raises a plain RuntimeError without a code, so only the message tells it from others.
    return type(error) is RuntimeError and (
        _ON_CORES in str(error) or is_thread_limit_error(error) or is_shared_memory_error(error)
    )


def may_be_out_of_memory(error: BaseException) -> bool:
    """Return whether memory may have been exhausted: the errors of some devices have no other sign than this word."""
    return is_out_of_memory(error) or "memory" in str(error).lower()


def is_shared_memory_error(error: BaseException) -> bool:
    """Return whether an error of torch means that shared memory had no room for a batch of a worker."""
    words = str(error)
    return isinstance(error, RuntimeError) and any(text in words for text in _SHARED) and _MANY_FILES not in words


def is_thread_limit_error(error: BaseException) -> bool:
    """Return whether an error means that the system starts no thread more for this user or container."""
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def convert_worker_error(error: BaseException) -> OutOfMemory | None:
    """Return the OutOfMemory error to raise where processes, threads or shared memory are exhausted; else None."""
    if is_shared_memory_error(error):
        what, more = "the shared memory has no room for the batches of data workers", MORE_SHARED
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        what, more = "the shared memory has no room for the locks of data workers", MORE_SHARED
    elif is_thread_limit_error(error) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        what, more = "the system starts no more processes or threads", MORE_THREADS
    else:
        return None
    last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    failed = OutOfMemory(
        f"{what}: {last[0]}", allowed="workers that the system has room for", do=f"{more}; or add train.num_workers=0"
    )
    failed.settings, failed.more = WITHOUT_WORKERS, more
    return failed


def is_step_too_large(error: BaseException) -> bool:
    """Return whether an error means that a step needs more memory than there is, which a smaller batch may not."""
    return is_out_of_memory(error) and not is_thread_limit_error(error) and not is_shared_memory_error(error)


def convert_memory_error(error: BaseException, doing: str, do: str) -> OutOfMemory | None:
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
    if is_thread_limit_error(error):
        do = MORE_THREADS
    elif is_shared_memory_error(error):
        do = MORE_SHARED
    what = f"out of memory {doing}".strip()
    return OutOfMemory(f"{what}: {format_error_line(error)}", allowed="a batch that fits into the memory", do=do)
