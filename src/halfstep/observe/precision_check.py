"""Check which precision really runs: the first step is observed, and not applied if it is the wrong one."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from halfstep.errors import PrecisionNotObserved
from halfstep.finding import Finding
from halfstep.formats import BF16, FP16, FP32, FP64
from halfstep.numbers import format_percent
from halfstep.observe.flops import SHARE_REQUIRED, Observation, WorkByFormat
from halfstep.observe.lint.functions import OwnFunctionLint
from halfstep.observe.lint.listener import add_finding_location
from halfstep.observe.recorder import MemoryListener, Recorder, has_compiled_code, run_eagerly
from halfstep.precision.converted import find_converted_layers
from halfstep.precision.precision import Precision

_NAMED = 5


def build_not_observed_error(asked: str, seen: Observation) -> PrecisionNotObserved:
    """Return the error for a step that ran in another precision than requested."""
    if seen.as_asked:
        return PrecisionNotObserved(
            f"{asked} was requested, but no product ran in fp8: no converted layer ran",
            allowed="layers that the forward pass calls; reading only their weight does not count",
            do="precision='bf16', or a policy that names the layers which run",
        )
    most = max(seen.flops, key=lambda name: seen.flops[name])
    remedy = "remove casts and autocast(enabled=False) there, declare it with island(), or request another precision"
    if most == FP64.name:
        remedy = "precision='fp64' for a model in float64, or model.float() and batches in float32"
    elif seen.expected == FP32.name and most in (BF16.name, FP16.name):
        remedy = f"precision={most!r} for a base stored in {most}, or model.float()"
    return PrecisionNotObserved(
        f"{asked} was requested, but matrix products and convolutions ran in {_format_shares(seen)}: "
        + ", ".join(list(seen.strays)[:_NAMED]),
        allowed=f"{SHARE_REQUIRED:.0%} of the work outside islands in {seen.expected}",
        do=remedy,
    )


def build_changed_precision_finding(asked: str, seen: Observation) -> Finding:
    """Return the finding for a running run whose precision changed; it does not end the run."""
    return Finding(
        "precision.changed",
        "warning",
        f"{asked} was requested, but now matrix products and convolutions run in {_format_shares(seen)}: "
        + ", ".join(list(seen.strays)[:_NAMED]),
        "remove casts and autocast(enabled=False) there, or declare it with island()",
    )


def build_doubtful_precision_finding(asked: str, seen: Observation) -> Finding:
    """Return the finding for a step whose precision can be neither refused nor confirmed."""
    known = (
        "nothing else was seen"
        if seen.share is None
        else f"of the rest {format_percent(seen.share)} ran in {seen.expected}"
    )
    return Finding(
        "precision.unknown",
        "warning",
        f"whether this ran in {asked} is unknown: no rule counts the work of "
        f"{', '.join(list(seen.unknown)[:_NAMED])}; {known}",
        "check the dtypes of their inputs, or declare what stays in fp32 with island()",
    )


def _format_shares(seen: Observation) -> str:
    total = sum(seen.flops.values())
    return ", ".join(f"{name} {format_percent(part / total)}" for name, part in seen.flops.items())


FIRST_AGAIN, _FACTOR = 10, 10
"""The update at which a step is observed again, and the ratio of each further one to the one before."""


def can_observe_again(model: nn.Module) -> bool:
    """Return whether the model may be observed: never if anything was compiled, because an observed step is eager."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    compiled = dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
    return not compiled and not has_compiled_code(model)


class ObservationSchedule:
    """The updates at which to observe again: the tenth, and then ten times as many each time.

    An observed step costs as much as 4 to 11 steps, more with more modules; its share of a long run vanishes.
    """

    def __init__(self) -> None:
        self.next_update = FIRST_AGAIN
        """The number of applied updates after which a step is observed next."""

    def continue_from(self, other: ObservationSchedule) -> None:
        """Observe at the updates at which another schedule would."""
        self.next_update = other.next_update

    def due(self, applied: int) -> bool:
        """Return True once for each of them, however often a step is repeated."""
        if applied < self.next_update:
            return False
        while self.next_update <= applied:
            self.next_update *= _FACTOR
        return True


class ObservationCost:
    """What the first steps of a run take: the first one, which is observed, and those after it."""

    def __init__(self) -> None:
        self._began = self._observed = 0.0
        self._plain = math.inf

    def begin(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def end(self, *, observed: bool) -> None:
        """Note what a step took."""
        took = time.perf_counter() - self._began
        if observed:
            self._observed = max(self._observed, took)
        else:
            self._plain = min(self._plain, took)

    @property
    def is_high(self) -> bool:
        """Whether an observation at the tenth update would show in a short run."""
        return self._observed > MOST_SECONDS and self._observed > MOST_STEPS * self._plain


MOST_STEPS, MOST_SECONDS = 5, 0.25
"""Plain steps, and seconds, that the first observed step may take; beyond both, the tenth update is not observed."""


class PrecisionObserver:
    """A step's scope that observes one step and then hands the original scope back.

    A dispatch mode on a compiled function's first call would disable its compilation permanently and silently. So the
    observed step runs eagerly, and compilation starts with the next one; autocast chooses formats by the same rules in
    traced and in eager code.
    """

    def __init__(
        self,
        inner: AbstractContextManager[object],
        model: nn.Module,
        precision: Precision,
        *,
        done: Callable[[AbstractContextManager[object], Observation], None],
        emit: Callable[[Sequence[Finding]], None],
        memory: MemoryListener | None = None,
    ) -> None:
        """Observe a step inside `inner`; `done` gets `inner` and the observation, `emit` gets findings.

        `memory` learns which memory from before the step is used.
        """
        self._inner, self._model, self._precision, self._done = inner, model, precision, done
        self._emit, self._memory = emit, memory
        self._own_functions = OwnFunctionLint(self._maker, self._report_finding)
        self._recording: tuple[WorkByFormat, Recorder] | None = None
        self._active = ExitStack()

    def __enter__(self) -> None:
        if self._recording is None:
            # One recorder for the whole step: in backward it needs what it saw in forward.
            tally = WorkByFormat(self._model, self._precision.computes.name)
            self._recording = tally, Recorder(self._model, tally, memory=self._memory)
        with ExitStack() as entering:
            entering.enter_context(self._inner)
            entering.enter_context(run_eagerly())
            entering.enter_context(self._recording[1])
            if self._precision.casts:
                entering.enter_context(self._own_functions)
            # Only if all of them were entered: an error in between closes those that were.
            self._active = entering.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._active.close()

    def begin(self) -> None:
        """Discard the recording of an unfinished step."""
        self._recording = None

    def judge(self) -> None:
        """Conclude the observation, after the last backward; raise PrecisionNotObserved if another precision ran."""
        if self._recording is None or not self._recording[0].backward_seen:
            return
        (tally, _), self._recording = self._recording, None
        observation = tally.observation()
        converted = self._precision.changes_model
        if not observation.as_asked or (converted and not observation.fp8 and find_converted_layers(self._model)):
            self._refuse(observation)
        elif observation.in_doubt:
            self._emit([build_doubtful_precision_finding(self._precision.name, observation)])
        self._done(self._inner, observation)

    def _refuse(self, observation: Observation) -> None:
        raise build_not_observed_error(self._precision.name, observation)

    def _maker(self, node: Any) -> str:
        assert self._recording is not None, "an origin of backward is looked up while the step is recorded"
        return self._recording[1].maker(node)

    def _report_finding(self, finding: Finding, module: str, line: str | None) -> None:
        """Report a finding at once, because the backward that follows may end the step."""
        self._emit([add_finding_location(finding, module, line)])


class RepeatedPrecisionObserver(PrecisionObserver):
    """A repeated observation of a running run: findings are reported, and nothing is refused."""

    def _refuse(self, observation: Observation) -> None:
        self._emit([build_changed_precision_finding(self._precision.name, observation)])
