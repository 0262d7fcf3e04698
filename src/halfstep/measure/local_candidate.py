"""A candidate in this process, for a model that is live here and cannot be sent to another one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from halfstep.errors import HalfstepError, format_error_line
from halfstep.measure.candidate import Candidate, measure_update_peak, take_timed_update
from halfstep.measure.case import Case
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.worker_process import (
    CandidateFailed,
    CandidateInfo,
    CandidateProcess,
    CandidateTooSlow,
    TimedUpdate,
)
from halfstep.out_of_memory import may_be_out_of_memory


def create_candidate(
    subject: Subject | Case, setting: StepSetting, device: str | None = None
) -> CandidateProcess | LocalCandidate:
    """Return a candidate that is not open yet: a subject's in its own process, a live case's in this one."""
    if isinstance(subject, Case):
        return LocalCandidate(subject, setting, device)
    return CandidateProcess(subject, setting, device, observe=needs_observation(setting))


def needs_observation(setting: StepSetting) -> bool:
    """Return whether to observe the first step: it would run eagerly, but a compiled candidate must compile in it."""
    return not setting.compile


class LocalCandidate:
    """The same candidate in this process. A call cannot be interrupted: a timeout is raised only after it returns."""

    def __init__(self, case: Case, setting: StepSetting, device: str | None = None) -> None:
        self._case, self._setting, self._device = case, setting, device
        self._candidate: Candidate | None = None

    def open(self, limit: float | None = None) -> CandidateInfo:
        """Build the candidate."""
        with _convert_candidate_errors(limit):
            self._candidate = Candidate(
                self._case, self._setting, self._device, observe=needs_observation(self._setting)
            )
        return self._candidate.opened

    def seconds(self, steps: int = 1, limit: float | None = None) -> float:
        """Return the seconds of one update, averaged over `steps`."""
        with _convert_candidate_errors(limit):
            return self._opened.seconds(steps)

    def trail(self, steps: int) -> list[float]:
        """Return the losses of the first `steps` updates."""
        return self._opened.trail[:steps]

    def losses(self, steps: int, limit: float | None = None) -> list[float]:
        """Take `steps` more updates and return their losses."""
        with _convert_candidate_errors(limit):
            return self._opened.losses(steps)

    def graphs(self) -> int:
        """Return how many graphs were compiled."""
        return self._opened.graphs

    def nudge(self, share: float, seed: int = 1) -> None:
        """Perturb every weight, as `Candidate.nudge` does."""
        self._opened.nudge(share, seed)

    def update(self, limit: float | None = None) -> TimedUpdate:
        """Take one more update and time it."""
        with _convert_candidate_errors(limit):
            return take_timed_update(self._opened)

    def memory(self) -> int:
        """Return the peak bytes of tensors during one more update, as counted by the allocator."""
        with _convert_candidate_errors(None):
            return measure_update_peak(self._opened)

    def close(self) -> None:
        """Drop the candidate and its memory."""
        self._candidate = None

    def __enter__(self) -> LocalCandidate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _opened(self) -> Candidate:
        assert self._candidate is not None, "open it first"
        return self._candidate


@contextmanager
def _convert_candidate_errors(limit: float | None) -> Iterator[None]:
    """Raise what `CandidateProcess` would: `CandidateFailed` for other errors than ours, and `CandidateTooSlow`."""
    begin = time.perf_counter()
    try:
        yield
    except HalfstepError:
        raise
    except Exception as error:
        raise CandidateFailed(format_error_line(error), out_of_memory=may_be_out_of_memory(error)) from error
    if limit is not None and time.perf_counter() - begin > limit:
        raise CandidateTooSlow(f"no answer within {limit:.3g} s")
