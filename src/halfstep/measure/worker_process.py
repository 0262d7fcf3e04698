"""Run a candidate in its own process, so that it shares no caches, flags or memory with another.

Parent and child exchange one line of JSON each way: nothing is unpickled, and the child's own prints go to stderr.
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any, TypedDict

from halfstep.errors import ENDED_FROM_OUTSIDE, WrongUse
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject

if TYPE_CHECKING:
    from halfstep.measure.conditions import Conditions

CHILD = "halfstep.measure.worker"
_LAST_WORDS = 2000
_PATIENCE = 1.0
"""Seconds to wait for the remaining output of a process that has ended."""


class CandidateFailed(Exception):
    """The candidate cannot run here; the message is the last output of its process."""

    def __init__(self, why: str, *, out_of_memory: bool = False) -> None:
        super().__init__(why)
        self.out_of_memory = out_of_memory
        """Whether a smaller batch may be able to run."""


class CandidateTooSlow(Exception):
    """The candidate did not answer in time and its process was killed."""


class CandidateInfo(TypedDict):
    """The first answer of a candidate, also across processes."""

    conditions: Conditions
    samples: int
    """Samples in one update."""


@dataclass(frozen=True)
class TimedUpdate:
    """One update of a candidate."""

    seconds: float
    loss: float
    reason: str | None
    """Why it was skipped; None if it was applied."""


class CandidateProcess:
    """The same candidate as `Candidate`, in another process. It is idle between requests."""

    module = CHILD

    def __init__(
        self, subject: Subject, setting: StepSetting, device: str | None = None, *, observe: bool = True
    ) -> None:
        self.setting = setting
        self._child = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # The user's code may print bytes that are not UTF-8.
            errors="replace",
            start_new_session=True,  # Ctrl-C is handled by this process alone
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._last_words = ""
        self._closed = False
        self._readers = [
            threading.Thread(target=reader, args=(stream,), daemon=True)
            for stream, reader in ((self._child.stdout, self._read_answers), (self._child.stderr, self._read_errors))
        ]
        for reader in self._readers:
            reader.start()
        self._begin = {
            "text": subject.text,
            "settings": list(subject.settings),
            "setting": asdict(setting),
            "device": device,
            "observe": observe,
        }

    def open(self, limit: float | None = None) -> CandidateInfo:
        """Build the candidate.

        Raises `CandidateFailed`, or `WrongUse` if the child refused the case or the setting.
        """
        opened: CandidateInfo = self._ask(self._begin, limit)
        return opened

    def seconds(self, steps: int = 1, limit: float | None = None) -> float:
        """Return the seconds of one update, averaged over `steps`; `limit` is the timeout of the answer in seconds."""
        return float(self._ask({"do": "seconds", "steps": steps}, limit))

    def losses(self, steps: int, limit: float | None = None) -> list[float]:
        """Take `steps` more updates and return their losses."""
        return [float(loss) for loss in self._ask({"do": "losses", "steps": steps}, limit)]

    def trail(self, steps: int) -> list[float]:
        """Return the losses of the first `steps` updates, including those that were timed."""
        return [float(loss) for loss in self._ask({"do": "trail", "steps": steps})]

    def graphs(self) -> int:
        """Return how many graphs were compiled in the child."""
        return int(self._ask({"do": "graphs"}))

    def nudge(self, share: float, seed: int = 1) -> None:
        """Multiply every weight by 1 + `share` × normal noise."""
        self._ask({"do": "nudge", "share": share, "seed": seed})

    def update(self, limit: float | None = None) -> TimedUpdate:
        """Take one more update and time it."""
        return TimedUpdate(**self._ask({"do": "update"}, limit))

    def memory(self) -> int:
        """Return the peak bytes of tensors during one more update, as counted by the allocator."""
        return int(self._ask({"do": "memory"}))

    def close(self) -> None:
        """Kill the process and everything that the user's code started there."""
        if self._closed:
            return
        self._closed = True
        end_process(self._child)
        for reader in self._readers:
            reader.join(_PATIENCE)
        ended = [not reader.is_alive() for reader in self._readers]
        streams = (self._child.stdin, self._child.stdout, self._child.stderr)
        for stream, can_be_closed in zip(streams, (True, *ended), strict=True):
            # A stream that a thread still reads cannot be closed: a process in another session holds its other end.
            if stream is not None and can_be_closed:
                with contextlib.suppress(OSError):  # a request that was never read
                    stream.close()

    def __enter__(self) -> CandidateProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Mapping[str, object], limit: float | None = None) -> Any:
        """Return the answer as JSON gives it."""
        assert self._child.stdin is not None
        try:
            print(json.dumps(question), file=self._child.stdin, flush=True)
        except (OSError, ValueError):  # either end of the pipe is closed
            line = None
        else:
            line = self._answer(limit)
        if line is None:
            self._child.wait()
            # The reason of a crash is on stderr, which may arrive after stdout has closed.
            self._readers[1].join(_PATIENCE)
            raise self._ended()
        answer = json.loads(line)
        if "refused" in answer:
            refused = answer["refused"]
            error = WrongUse(refused["given"], allowed=refused["allowed"], do=refused["do"], id=refused["id"])
            error.exit_code = refused["code"]
            raise error
        if "failed" in answer:
            raise CandidateFailed(answer["failed"], out_of_memory=answer["out_of_memory"])
        return answer["answer"]

    def _answer(self, limit: float | None) -> str | None:
        """Return the next line; raise `CandidateTooSlow` if there is none within `limit` seconds."""
        try:
            return self._answers.get(timeout=None if limit is None else max(0.0, limit))
        except queue.Empty:
            self.close()
            raise CandidateTooSlow(f"no answer within {limit:.3g} s") from None

    def _read_answers(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put(None)

    def _read_errors(self, stream: IO[str]) -> None:
        for line in stream:
            self._last_words = (self._last_words + line)[-_LAST_WORDS:]

    def _ended(self) -> CandidateFailed:
        code = self._child.returncode
        # SIGKILL: not sent by us while an answer is awaited, so most likely the kernel's out-of-memory killer.
        if code == -9:
            why = f"its process {ENDED_FROM_OUTSIDE}"
            return CandidateFailed(why, out_of_memory=True)
        lines = self._last_words.strip().splitlines()
        why = lines[-1] if lines else f"its process ended with code {code}"
        return CandidateFailed(why, out_of_memory="memory" in why.lower())  # the words of a driver or a library


def end_process(child: subprocess.Popen[Any]) -> None:
    """Kill a process that was started in its own session, and everything that it started there."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is already gone
            os.killpg(child.pid, signal.SIGKILL)
    # For systems without process groups.
    child.kill()
    child.wait()
