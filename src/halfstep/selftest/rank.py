"""One rank of the part `ranks`, as torchrun starts it: `python -m halfstep.selftest.rank PID DEVICE`.

torchrun starts every rank in a session of its own, which nobody ends with the self-test. So each rank watches the
process that asked for it, and begins with that before it loads torch, which takes seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time

_LOOK = 0.5


def main(pid: int, kind: str) -> None:
    """Be a rank for as long as the process with this id lives."""
    # On Windows a signal of number 0 would end that process.
    if os.name != "nt":
        threading.Thread(target=_end_with, args=(pid,), daemon=True).start()
    from halfstep.selftest.parts.ranks import answer

    answer(kind)


def _end_with(pid: int) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(_LOOK)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
