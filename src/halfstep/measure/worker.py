"""The child process of one candidate: reads a line of JSON, answers with one, until its input ends."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from halfstep.errors import HalfstepError, format_error_line
from halfstep.host_memory import keep_freed_memory
from halfstep.json_data import convert_to_json_data

_MOST_BYTES = 2**16


def serve_requests(open_case: Callable[..., Any] | None = None, do: Callable[..., Any] | None = None) -> None:
    """Serve requests from standard input.

    Other child processes pass their own `open_case` and `do` and use the same protocol.
    """
    # The parent handles Ctrl-C and decides when the child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the user's code must not be read as an answer
    # Before anything large is allocated: otherwise glibc returns freed pages, and each step pays for them again.
    keep_freed_memory()
    candidate: Any = None
    for question in _iterate_requests():
        if candidate is None:
            candidate = _answer_request(answers, partial(open_case or _open_candidate, question))
        else:
            _answer_request(answers, partial(do or _run_request, candidate, question))


def _iterate_requests() -> Iterator[dict[str, Any]]:
    """Yield the requests, read in a thread, so that the end of the input also ends a long step.

    The input ends when the parent does, even if it was killed. It is read without Python's buffer: at exit the
    interpreter would wait for the buffer's lock, which the reading thread holds.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read_input() -> None:
        with open(0, "rb", buffering=0, closefd=False) as stream:
            line = b""
            while part := stream.read(_MOST_BYTES):
                *whole, line = (line + part).split(b"\n")
                for question in whole:
                    lines.put(question)
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # also ends the processes that the user's code started
        # Not sys.exit: the main thread may be in the middle of a long step.
        os._exit(0)

    threading.Thread(target=read_input, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def _open_candidate(question: dict[str, Any]) -> tuple[Any, object]:
    from halfstep.measure.candidate import Candidate
    from halfstep.measure.setting import StepSetting
    from halfstep.measure.subject import Subject

    case = Subject(question["text"], tuple(question["settings"])).open()
    setting = StepSetting(**question["setting"])
    candidate = Candidate(case, setting, question["device"], observe=question["observe"])
    return candidate, candidate.opened


def _run_request(candidate: Any, question: dict[str, Any]) -> tuple[Any, object]:
    return candidate, _DO[question.pop("do")](candidate, **question)


def _time_update(candidate: Any) -> object:
    from halfstep.measure.candidate import take_timed_update

    return take_timed_update(candidate)


def _measure_candidate_peak(candidate: Any) -> object:
    from halfstep.measure.candidate import measure_update_peak

    return measure_update_peak(candidate)


_DO: dict[str, Callable[..., object]] = {
    "seconds": lambda candidate, steps: candidate.seconds(steps),
    "losses": lambda candidate, steps: candidate.losses(steps),
    "update": _time_update,
    "memory": _measure_candidate_peak,
    "trail": lambda candidate, steps: candidate.trail[:steps],
    "graphs": lambda candidate: candidate.graphs,
    "nudge": lambda candidate, share, seed: candidate.nudge(share, seed),
}


def _answer_request(answers: IO[str], work: Callable[[], tuple[Any, object]]) -> Any:
    """Run the request and print its answer. An error does not end the process; the next request may succeed."""
    result = None
    try:
        result, found = work()
        answer = {"answer": convert_to_json_data(found)}
    except HalfstepError as error:
        refusal = {"given": error.given, "allowed": error.allowed, "do": error.do, "code": error.exit_code}
        answer = {"refused": {**refusal, "id": error.id}}
    except Exception as error:  # the user's code may raise anything
        from halfstep.out_of_memory import may_be_out_of_memory

        answer = {"failed": format_error_line(error), "out_of_memory": may_be_out_of_memory(error)}
    print(json.dumps(answer), file=answers, flush=True)
    return result


if __name__ == "__main__":
    serve_requests()
