"""Run all meters: decide which steps are sampled, and collect the findings.

On a step that is not sampled, they compare two numbers. On a sampled one, they write to device memory without waiting;
the result is read at the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.guard.monitors.base import AsyncScalars, MeteredMembers, Monitor, Reading, SampledStep
from halfstep.guard.monitors.gradients import LOOKS, UnreachedParameters, VanishingGradients
from halfstep.guard.monitors.headroom import Headroom
from halfstep.guard.monitors.trends import ScaleTrend, SkipRate
from halfstep.guard.monitors.unchanged_weights import LostUpdates, UnchangedAverages
from halfstep.step.report import StepReport
from halfstep.step.stepper import Stepper

USUAL = 50
"""The usual interval in steps."""
LEAST_STEPS = 100
"""The steps per step's worth of sampling time: samples take at most 1 % of a run."""
SELDOM = 20
"""The maximum factor on the usual interval: a machine that was busy for a moment must not end the metering."""


class SampleInterval:
    """The interval between samples; it grows if a sample takes more than half a step."""

    def __init__(self) -> None:
        self.every = USUAL
        self._spent = 0.0
        self._ended: float | None = None
        self._samples = 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Measure the time of the block as part of a sample."""
        began = perf_counter()
        try:
            yield
        finally:
            self._spent += perf_counter() - began

    def begin(self) -> None:
        """Start a sample."""
        self._spent, self._ended = 0.0, None

    def end(self, in_hooks: float) -> None:
        """End the sampled step; the next step shows how long a step is."""
        self._spent += in_hooks
        self._ended = perf_counter()

    def settle(self) -> None:
        """Adapt the interval after the following step."""
        # The first sample is not counted: it loads what later ones find loaded.
        self._samples += 1
        if self._ended is not None and self._samples > 1:
            self.every = compute_sampling_interval(self._spent, perf_counter() - self._ended)


def compute_sampling_interval(sample: float, step: float) -> int:
    """Return the interval for the times of a sample and a step, as a multiple of the usual one."""
    times = math.ceil(LEAST_STEPS * sample / step / USUAL) if step > 0 else SELDOM
    return USUAL * min(max(times, 1), SELDOM)


R = TypeVar("R")
FIRST = 10
"""The step of the first sample, early enough for a short run."""


class Meters:
    """The meters of a run; they sample every 50th step. Findings are local: each rank sees its share of the batch.

    Args:
        stepper: The Stepper.
        every: The steps between two samples. By default the interval grows if a sample takes more than half a step, so
            that meters take at most 1 % of the time.

    Raises:
        WrongUse: `every` is below 1.
    """

    name = "meters"
    same_on_all_ranks = True

    def __init__(self, stepper: Stepper, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise WrongUse(f"meters every {every} steps", allowed="1 or more", do="Meters(stepper, every=50)")
        self._stepper, self._asked, self._interval = stepper, every, SampleInterval()
        self._members = MeteredMembers(stepper)
        self._scalars = AsyncScalars(stepper.device)
        self._unreached = UnreachedParameters()
        self._all: tuple[Monitor, ...] = (
            Headroom(),
            VanishingGradients(),
            LostUpdates(),
            UnchangedAverages(),
            self._unreached,
            ScaleTrend(),
            SkipRate(),
        )
        self._looking: tuple[Monitor, ...] = ()
        """The meters that observe this step."""
        self._sampled = False
        """Whether all meters observe it, or only the one for unused parameters."""
        self._failures: list[Finding] = []
        self._open: SampledStep | None = None
        self._sent: SampledStep | None = None
        self._steps, self._looks, self._turn = 0, 0, 0
        self._next = self._sample_at = 1
        self.readings: dict[str, Reading] = {}
        """The latest numbers of all meters, for the journal."""
        # First: a guard after it may refuse the step, and then the gradients would not be seen.
        stepper.guards.insert(0, self)

    @property
    def every(self) -> int:
        """Return the steps from one sample to the next."""
        return self._interval.every if self._asked is None else self._asked

    def before(self) -> None:
        """Prepare right before each step; nothing else may run the model until `after` or `abandon`."""
        self._steps += 1
        if self._steps >= self._next:
            self._begin(hooks=True)

    def between(self) -> None:
        """Prepare between two steps, instead of `before`; no hooks, since the model may also run outside a step."""
        self._steps += 1
        if self._steps >= self._next:
            self._begin(hooks=False)

    def abandon(self) -> None:
        """Remove everything from the model after a step that raised an error."""
        if self._open is not None:
            self._drop()

    def passes(self, report: StepReport) -> bool:
        """Accept every step; being a guard gives access to the gradients before the update."""
        if self._open is not None:
            self._open.report = report
            with self._interval.spending():
                for meter in self._looking:
                    self._call(meter, meter.gradients, self._open)
        return True

    @property
    def has_sample(self) -> bool:
        """Whether `after` has something to finish."""
        return self._open is not None or self._sent is not None

    def after(self, report: StepReport) -> list[Finding]:
        """Finish right after each step, before the model runs again; return the findings of the previous sample."""
        if self._open is None and self._sent is None:
            return []
        return [*self._read(), *self._end(report)]

    def close(self) -> None:
        """Remove the meters from the model and the stepper."""
        self._drop()
        self._sent = None
        self._stepper.guards[:] = [guard for guard in self._stepper.guards if guard is not self]

    def _begin(self, *, hooks: bool) -> None:
        # For a caller that did not report that the previous step raised an error.
        self.abandon()
        # One sample at a time: the scalars is still being copied.
        if self._sent is not None:
            return
        if not self._looks:
            self._start()
        self._looks += 1
        self._sampled = self._steps >= self._sample_at
        self._interval.begin()
        with self._interval.spending():
            self._members.look()
            self._open = SampledStep(self._stepper, self._scalars, self._members, self._turn, hooks=hooks)
            if self._sampled:
                self._looking = tuple(m for m in self._all if m.turn in (None, self._turn % 2))
                self._turn += 1
                self._scalars.wipe()
            else:
                self._looking = tuple(m for m in self._all if m is self._unreached)
            for meter in self._looking:
                self._call(meter, meter.before, self._open)
        self._plan()

    def _plan(self) -> None:
        """Choose the next step to observe."""
        if self._sampled:
            self._sample_at = (self._steps // self.every + 1) * self.every
        self._next = self._steps + 1 if self._looks < LOOKS else self._sample_at

    def _start(self) -> None:
        """Continue the interval of a resumed run."""
        self._steps = self._stepper.counts.attempted + 1
        first = min(FIRST, self.every)
        multiple = -(-self._steps // self.every) * self.every
        self._sample_at = first if self._steps <= first else multiple
        self._turn = self._sample_at // self.every

    def _end(self, report: StepReport) -> list[Finding]:
        sample, self._open = self._open, None
        if sample is None:
            return []
        sample.report = report
        with self._interval.spending():
            for meter in self._looking:
                self._call(meter, meter.after, sample)
            if not self._sampled:
                return [found for meter in self._looking for found in self._call(meter, meter.read, sample, ()) or []]
            self._scalars.send()
        self._sent = sample
        self._interval.end(sample.in_hooks)
        return []

    def _read(self) -> list[Finding]:
        if self._sent is None or not self._scalars.arrived:
            return []
        sample, self._sent = self._sent, None
        numbers = self._scalars.read()
        found, self._failures = self._failures, []
        for meter in self._looking:
            found += self._call(meter, meter.read, sample, numbers) or []
        self._interval.settle()
        self._plan()
        self.readings = {name: reading for meter in self._all for name, reading in meter.readings.items()}
        return found

    def _call(self, meter: Monitor, act: Callable[..., R], *given: object) -> R | None:
        """Call a meter; switch it off if it fails, because an observer must not end a run."""
        try:
            return act(*given)
        except Exception as error:
            meter.drop()
            self._all = tuple(m for m in self._all if m is not meter)
            self._looking = tuple(m for m in self._looking if m is not meter)
            what = f"{type(meter).__name__} failed and is now off: {type(error).__name__}: {error}"
            self._failures.append(Finding("meter-off", "note", what, "training continues without it; please report it"))
            return None

    def _drop(self) -> None:
        for meter in self._looking:
            meter.drop()
        self._open = None
