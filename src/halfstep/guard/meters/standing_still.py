"""Numbers that should have moved with an update and did not: of one weight at a time, before and after."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from halfstep.finding import Finding
from halfstep.guard.meters.meter import Crossings, Meter
from halfstep.guard.meters.sample import Sample, Trained, taking_turns


@dataclass
class Before:
    """What is known of a weight ahead of the update."""

    one: Trained
    numbers: Tensor
    """A copy of those that are to move."""


class StandingStill(Meter):
    """Counts the elements that should have moved, and those of them that are what they were, bit for bit."""

    turn = 1

    def __init__(self) -> None:
        super().__init__()
        self._before: Before | None = None
        self._noted: tuple[Before, int, int] | None = None
        self._over = Crossings()

    @abstractmethod
    def begun(self, sample: Sample, one: Trained) -> Before | None:
        """Ahead of the update; None for a weight that is nothing to this meter."""

    @abstractmethod
    def moved(self, sample: Sample, before: Before) -> tuple[Tensor, Tensor] | None:
        """After it: which elements stayed, and which should have moved."""

    @abstractmethod
    def judged(self, sample: Sample, before: Before, share: float) -> Finding | None:
        """What to say of the share of those that stayed; the readings are set here."""

    def before(self, sample: Sample) -> None:
        self._before = self._noted = None

    def gradients(self, sample: Sample) -> None:
        for one in taking_turns(sample.with_gradients, sample.turn // 2, 1):
            self._before = self.begun(sample, one)

    def after(self, sample: Sample) -> None:
        before, self._before = self._before, None
        if before is None or sample.report is None or not sample.report.applied:
            return
        found = self.moved(sample, before)
        if found is not None:
            stayed, should_move = found
            lost = sample.slate.note((stayed & should_move).count_nonzero())
            self._noted = before, lost, sample.slate.note(should_move.count_nonzero())

    def drop(self) -> None:
        self._before = None

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        noted, self._noted = self._noted, None
        if noted is None or not numbers[noted[2]]:
            return []
        before, stayed, should_move = noted
        finding = self.judged(sample, before, numbers[stayed] / numbers[should_move])
        name = before.one.name
        fresh = self._over.new([name], [] if finding is None else [name])
        return [finding] if finding is not None and fresh else []
