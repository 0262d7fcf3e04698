"""Work that may never come back, such as a write to a disk that has stopped answering, with a limit. Imports little."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_within_deadline(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a thread and return whether it ended in time; otherwise the thread is left behind.

    What `work` raises is lost with the thread. The thread does not keep the process from exiting.
    """
    thread = threading.Thread(target=work, name="halfstep deadline", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread more, by a limit or in the exit of the interpreter
        work()
        return True
    thread.join(seconds)
    return not thread.is_alive()
