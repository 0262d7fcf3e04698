"""An arm in a process of its own, so that none inherits another's caches, switches or memory.

The two speak JSON, a line each way: nothing is unpickled, and the child's own prints go to its standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any

from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.case import Subject
from halfstep.measure.setting import Setting

CHILD = "halfstep.measure.child"
_LAST_WORDS = 2000
_PATIENCE = 1.0
"""Seconds for the last words of a process that was ended."""


class ArmFailed(Exception):
    """The arm cannot run here: what its process said last."""


class ArmTooSlow(Exception):
    """The arm did not answer in time, and was ended."""


class ArmProcess:
    """The same arm as `Arm`, elsewhere. Nothing runs there while it is not asked."""

    module = CHILD

    def __init__(self, subject: Subject, setting: Setting, device: str | None = None, *, observe: bool = True) -> None:
        self.setting = setting
        self._child = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._last_words = ""
        self._closed = False
        self._readers = [
            threading.Thread(target=reader, args=(stream,), daemon=True)
            for stream, reader in ((self._child.stdout, self._hear), (self._child.stderr, self._overhear))
        ]
        for reader in self._readers:
            reader.start()
        self._begin = {
            "text": subject.text,
            "settings": list(subject.settings),
            "setting": setting.as_dict(),
            "device": device,
            "observe": observe,
        }

    def open(self, limit: float | None = None) -> dict[str, Any]:
        """Build it; gives `conditions` and `samples`, as they are there. Raises what it raised, or `ArmFailed`."""
        return self._ask(self._begin, limit)

    def seconds(self, steps: int = 1, limit: float | None = None) -> float:
        """Of one update, averaged over `steps`; `limit` is for the answer, in seconds."""
        return float(self._ask({"do": "seconds", "steps": steps}, limit)["seconds"])

    def losses(self, steps: int, limit: float | None = None) -> list[float]:
        return [float(loss) for loss in self._ask({"do": "losses", "steps": steps}, limit)["losses"]]

    def trail(self, steps: int) -> list[float]:
        """Losses of the first `steps` updates that it has taken, while it was timed or otherwise."""
        return [float(loss) for loss in self._ask({"do": "trail", "steps": steps})["losses"]]

    def graphs(self) -> int:
        """How many graphs were compiled there."""
        return int(self._ask({"do": "graphs"})["graphs"])

    def nudge(self, share: float, seed: int = 1) -> None:
        """Move every weight by about this share of itself."""
        self._ask({"do": "nudge", "share": share, "seed": seed})

    def update(self, limit: float | None = None) -> dict[str, Any]:
        """One more, and its `seconds`, its `loss`, and the `reason` where it was skipped."""
        return self._ask({"do": "update"}, limit)

    def memory(self) -> int:
        """The most bytes of tensors during one more update, as the allocator counted them."""
        return int(self._ask({"do": "memory"})["bytes"])

    def close(self) -> None:
        """End it, and whatever the person's code started there."""
        if self._closed:
            return
        self._closed = True
        end_process(self._child)
        for reader in self._readers:
            reader.join(_PATIENCE)
        ended = [not reader.is_alive() for reader in self._readers]
        streams = (self._child.stdin, self._child.stdout, self._child.stderr)
        for stream, can_be_closed in zip(streams, (True, *ended), strict=True):
            # What is still read cannot be closed; it ends with whoever left for a session of their own.
            if stream is not None and can_be_closed:
                with contextlib.suppress(OSError):  # a question that nobody read
                    stream.close()

    def __enter__(self) -> ArmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
        assert self._child.stdin is not None
        try:
            print(json.dumps(question), file=self._child.stdin, flush=True)
        except (OSError, ValueError):  # its end of the pipe is closed, or ours
            line = None
        else:
            line = self._answer(limit)
        if line is None:
            self._child.wait()
            self._readers[1].join(_PATIENCE)
            raise ArmFailed(self._why())
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise _told(answer["refused"])
        if "failed" in answer:
            raise ArmFailed(answer["failed"])
        return answer

    def _answer(self, limit: float | None) -> str | None:
        """The next line, within `limit` seconds; of no time at all there is none to be had."""
        try:
            return self._answers.get(timeout=None if limit is None else max(0.0, limit))
        except queue.Empty:
            self.close()
            raise ArmTooSlow(f"no answer within {limit:.3g} s") from None

    def _hear(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put(None)

    def _overhear(self, stream: IO[str]) -> None:
        for line in stream:
            self._last_words = (self._last_words + line)[-_LAST_WORDS:]

    def _why(self) -> str:
        code = self._child.returncode
        if code == -9:
            return "its process was ended from outside, as a system does that has no memory left"
        said = self._last_words.strip().splitlines()
        return said[-1] if said else f"its process ended with code {code}"


def end_process(child: subprocess.Popen[Any]) -> None:
    """One that was started with a session of its own, and all that it started there."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of its group
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()


def _told(parts: dict[str, Any]) -> HalfstepError:
    error = WrongUse(parts["given"], allowed=parts["allowed"], do=parts["do"])
    error.exit_code = parts["code"]
    return error
