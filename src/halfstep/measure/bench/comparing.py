"""Runs every arm with every seed, in turns, and keeps what there is when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from halfstep.errors import HalfstepError, WrongUse, reason_in
from halfstep.measure.bench.figures import Gain, Raced
from halfstep.measure.bench.report import Bench
from halfstep.measure.bench.results import Memory, Metric, RunFailed, RunResult
from halfstep.measure.bench.row import rows_of
from halfstep.measure.process import ArmFailed, ArmTooSlow
from halfstep.measure.timing import Progress

OneRun = Callable[[int], RunResult]
"""Trains one arm with a seed."""
Race = Callable[[Sequence[str]], Raced]
"""Times the arms that are named beside one another."""


def compare(
    arms: Mapping[str, OneRun],
    *,
    name: str,
    seeds: Sequence[int],
    metric: Metric,
    conditions: Mapping[str, Any],
    settings: Sequence[str] = (),
    memories: Mapping[str, Callable[[], Memory]] | None = None,
    race: Race | None = None,
    price_per_hour: float | None = None,
    progress: Progress | None = None,
) -> Bench:
    """The first arm is the baseline. An arm that fails once is not run again; the others go on.

    Seed after seed, all arms of each, beginning with another arm each time: what the machine does meanwhile falls on
    all of them alike.
    """
    if not arms:
        raise WrongUse("a bench without arms", allowed="a baseline first, then others", do="name at least one")
    work = _Work(arms, seeds, memories or {}, race, progress)
    try:
        work.do()
    except KeyboardInterrupt:
        work.interrupted = True
    return Bench(
        name=name,
        metric=metric,
        seeds=tuple(seeds),
        rows=rows_of(work.runs, work.failed, metric, work.memories, work.gains),
        settings=tuple(settings),
        conditions=conditions,
        price_per_hour=price_per_hour,
        interrupted=work.interrupted,
        notes=tuple(work.notes),
        raced=bool(work.gains),
    )


class _Work:
    """What is to be done, and what has come of it so far."""

    def __init__(
        self,
        arms: Mapping[str, OneRun],
        seeds: Sequence[int],
        measure: Mapping[str, Callable[[], Memory]],
        race: Race | None,
        progress: Progress | None,
    ) -> None:
        self._arms, self._seeds, self._measure, self._race = arms, seeds, measure, race
        self._tell = progress or (lambda done, of: None)
        self._done = 0
        self.runs: dict[str, list[RunResult]] = {name: [] for name in arms}
        self.failed: dict[str, str] = {}
        self.memories: dict[str, Memory] = {}
        self.gains: dict[str, Gain] = {}
        self.notes: list[str] = []
        self.interrupted = False

    def do(self) -> None:
        self._tell(0, self._jobs())
        for name in self._measure:
            self._one(name, partial(self._remember, name))
        names = list(self._arms)
        for turn, seed in enumerate(self._seeds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                self._one(name, partial(self._run, name, seed))
        if self._race is not None:
            left = [name for name in names if name not in self.failed]
            if names[0] in left:
                self._time(left, self._race)
            self._advance()

    def _time(self, names: Sequence[str], race: Race) -> None:
        """A race that fails takes nothing away from what is finished: speed is then that of the runs."""
        try:
            raced = race(names)
        except (HalfstepError, ArmFailed, ArmTooSlow) as error:
            self.notes.append(f"speed is from the runs, as the race failed: {reason_in(error)}")
            return
        self.gains.update({name: gain for name, gain in raced.gains.items() if name not in raced.failed})
        self.interrupted = raced.interrupted
        self.notes += [f"{name}: speed is from its runs, as it failed in the race: {why}"
                       for name, why in raced.failed.items()]  # fmt: skip

    def _remember(self, name: str) -> None:
        self.memories[name] = self._measure[name]()

    def _run(self, name: str, seed: int) -> None:
        self.runs[name].append(self._arms[name](seed))

    def _one(self, name: str, work: Callable[[], None]) -> None:
        if name not in self.failed:
            try:
                work()
            except (HalfstepError, RunFailed, ArmFailed, ArmTooSlow) as error:
                self.failed[name] = reason_in(error)
        self._advance()

    def _advance(self) -> None:
        self._done += 1
        self._tell(self._done, self._jobs())

    def _jobs(self) -> int:
        return len(self._measure) + len(self._arms) * len(self._seeds) + (self._race is not None)
