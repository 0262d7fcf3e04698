"""All meters of a run: when they look, and what they found.

On a step that is not sampled they compare one number with another and do nothing else. On one that is, they write to
the device's memory and wait for nothing; what they saw is read at the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.guard.meters.headroom import Headroom
from halfstep.guard.meters.lost_updates import LostUpdates
from halfstep.guard.meters.members import Members
from halfstep.guard.meters.meter import Meter, Reading
from halfstep.guard.meters.pace import Pace
from halfstep.guard.meters.sample import Sample
from halfstep.guard.meters.scale_trend import ScaleTrend
from halfstep.guard.meters.skip_rate import SkipRate
from halfstep.guard.meters.slate import Slate
from halfstep.guard.meters.still_average import StillAverage
from halfstep.guard.meters.unreached import LOOKS, Unreached
from halfstep.guard.meters.vanishing import Vanishing
from halfstep.step.report import StepReport
from halfstep.step.transaction import Stepper

R = TypeVar("R")
FIRST = 10
"""The step of the first sample, so that a short run has one."""


class Meters:
    """Looks at every 50th step. What it finds is for people: each process sees its own share of the batch.

    Where `every` is left out and a sample takes more than half a step, it looks less often, so that meters take 1 % of
    the time at most.
    """

    name = "meters"

    def __init__(self, stepper: Stepper, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise WrongUse(f"meters every {every} steps", allowed="1 or more", do="Meters(stepper, every=50)")
        self._stepper, self._asked, self._pace = stepper, every, Pace()
        self._members = Members(stepper)
        self._slate = Slate(stepper.device)
        self._unreached = Unreached()
        self._all: tuple[Meter, ...] = (
            Headroom(),
            Vanishing(),
            LostUpdates(),
            StillAverage(),
            self._unreached,
            ScaleTrend(),
            SkipRate(),
        )
        self._looking: tuple[Meter, ...] = ()
        """The meters that look at this step."""
        self._sampled = False
        """Whether all of them do, or only the one that reads names."""
        self._failures: list[Finding] = []
        self._open: Sample | None = None
        self._sent: Sample | None = None
        self._steps, self._looks, self._turn = 0, 0, 0
        self._next = self._sample_at = 1
        self.readings: dict[str, Reading] = {}
        """The newest numbers of all meters, for the journal."""
        stepper.guards.insert(0, self)  # before any that may refuse

    @property
    def every(self) -> int:
        """Steps from one sample to the next."""
        return self._pace.every if self._asked is None else self._asked

    def before(self) -> None:
        """Right ahead of each step: nothing else runs the model until `after` or `abandon`."""
        self._steps += 1
        if self._steps >= self._next:
            self._begin(hooks=True)

    def between(self) -> None:
        """In place of `before`, at any time since the last step: no hooks, because the model may run outside of one."""
        self._steps += 1
        if self._steps >= self._next:
            self._begin(hooks=False)

    def abandon(self) -> None:
        """The step ended with an error: nothing of the meters stays with the model."""
        if self._open is not None:
            self._drop()

    def passes(self, report: StepReport) -> bool:
        """As a guard it refuses nothing: here gradients can be seen before the update."""
        if self._open is not None:
            self._open.report = report
            with self._pace.spending():
                for meter in self._looking:
                    self._let(meter, meter.gradients, self._open)
        return True

    def after(self, report: StepReport) -> list[Finding]:
        """Right after each step, before anything else runs the model; the findings are those of the sample before."""
        if self._open is None and self._sent is None:
            return []
        return [*self._read(), *self._end(report)]

    def close(self) -> None:
        """No longer: nothing of the meters stays with the model or the stepper."""
        self._drop()
        self._sent = None
        self._stepper.guards[:] = [guard for guard in self._stepper.guards if guard is not self]

    def _begin(self, *, hooks: bool) -> None:
        self.abandon()  # where nobody said that the step ended with an error
        if self._sent is not None:  # one sample at a time
            return
        if not self._looks:
            self._start()
        self._looks += 1
        self._sampled = self._steps >= self._sample_at
        self._pace.begin()
        with self._pace.spending():
            self._members.look()
            self._open = Sample(self._stepper, self._slate, self._members, self._turn, hooks=hooks)
            if self._sampled:
                self._looking = tuple(m for m in self._all if m.turn in (None, self._turn % 2))
                self._turn += 1
                self._slate.wipe()
            else:
                self._looking = tuple(m for m in self._all if m is self._unreached)
            for meter in self._looking:
                self._let(meter, meter.before, self._open)
        self._plan()

    def _plan(self) -> None:
        """The next step to look at."""
        if self._sampled:
            self._sample_at = (self._steps // self.every + 1) * self.every
        self._next = self._steps + 1 if self._looks < LOOKS else self._sample_at

    def _start(self) -> None:
        """A run that is resumed goes on in its rhythm."""
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
        with self._pace.spending():
            for meter in self._looking:
                self._let(meter, meter.after, sample)
            if not self._sampled:
                return [found for meter in self._looking for found in self._let(meter, meter.read, sample, ()) or []]
            self._slate.send()
        self._sent = sample
        self._pace.end(sample.in_hooks)
        return []

    def _read(self) -> list[Finding]:
        if self._sent is None or not self._slate.arrived:
            return []
        sample, self._sent = self._sent, None
        numbers = self._slate.read()
        found, self._failures = self._failures, []
        for meter in self._looking:
            found += self._let(meter, meter.read, sample, numbers) or []
        self._pace.settle()
        self._plan()
        self.readings = {name: reading for meter in self._all for name, reading in meter.readings.items()}
        return found

    def _let(self, meter: Meter, act: Callable[..., R], *given: object) -> R | None:
        """A meter that fails is switched off: nothing that only watches may end a run."""
        try:
            return act(*given)
        except Exception as error:
            meter.drop()
            self._all = tuple(m for m in self._all if m is not meter)
            self._looking = tuple(m for m in self._looking if m is not meter)
            what = f"{type(meter).__name__} failed and is off from here on: {type(error).__name__}: {error}"
            self._failures.append(Finding("meter-off", "note", what, "training goes on without it; please report it"))
            return None

    def _drop(self) -> None:
        for meter in self._looking:
            meter.drop()
        self._open = None
