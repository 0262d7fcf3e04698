"""What a profile has measured, as plain data: what causes are found from, here or anywhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from halfstep.clock import FEWEST_FOR_INTERVAL

NARROW, WIDE, COPIES, UPDATE, OTHER, HOST, DATA = "narrow", "fp32", "copies", "update", "other", "host", "data"
PARTS = {
    DATA: "waiting for data",
    HOST: "Python and dispatch",
    COPIES: "casts and layout copies",
    NARROW: "matrix work, narrow",
    WIDE: "matrix work, fp32",
    OTHER: "other operations",
    UPDATE: "the optimizer's update",
}
"""What the time of a step goes to. The shares of them add up to 1."""
_WORKERS_A_CORE = 4
_CLEARLY_LONGER = 1.25


@dataclass(frozen=True)
class Warming:
    """The first steps: how long each took, and how much of it went to compiling."""

    seconds: tuple[float, ...]
    compiled: tuple[int, ...]
    """Graphs that were compiled in each."""
    compiling: tuple[float, ...]
    """Seconds of each that went to compiling."""
    reason: str = ""
    """Why the last one was compiled again, as torch says it."""


@dataclass(frozen=True)
class Kernels:
    """Where the time of a step on a fixed batch goes, by part; the shares add up to 1."""

    shares: Mapping[str, float]
    convolutions: float = 0.0
    """Share of convolutions in a narrow format, which are in `narrow` too."""
    top: Mapping[str, float] = field(default_factory=dict)
    """The operations that take most, with their format."""

    @property
    def matrix(self) -> float:
        return self.shares.get(NARROW, 0.0) + self.shares.get(WIDE, 0.0)


@dataclass(frozen=True)
class Work:
    """FLOPs of a step, by the format they were done in, and what stands out among the modules."""

    by_format: Mapping[str, int]
    wide: Mapping[str, int]
    """By module, in fp32, most first."""
    islands: tuple[str, ...] = ()
    """Modules that were declared to stay in fp32."""

    @property
    def total(self) -> int:
        return sum(self.by_format.values())

    @property
    def wide_share(self) -> float:
        return sum(self.wide.values()) / self.total if self.total else 0.0


@dataclass(frozen=True)
class Misaligned:
    """A layer whose channels are no multiple of 8, timed as it is and padded to the next one."""

    names: tuple[str, ...]
    """Of all layers that are the same."""
    channels: str
    padded: str
    flops_share: float
    seconds: float
    """Forward and backward of one of them."""
    padded_seconds: float
    low: float
    high: float
    """95 % interval of how many times as fast the padded one is."""
    kind: str = ""
    """Of layer, as torch calls it."""

    @property
    def saved(self) -> float:
        """Seconds a step; none where the two may be equally fast."""
        return max(0.0, self.seconds - self.padded_seconds) * len(self.names) if self.low > 1.0 else 0.0


@dataclass(frozen=True)
class Feeding:
    """Steps on batches as training reads them."""

    step: float
    """Seconds of a step, the wait included."""
    wait: float
    """Seconds of it in which nothing was there to compute with."""
    read: float
    """Seconds that one process takes to read the batches of one step."""
    read_cpu: float
    """The part of `read` in which it computes, rather than waits itself."""
    workers: int
    cores: int
    threads: int
    """Cores that the step itself keeps busy."""
    warming: Warming | None = None
    restarting: float = 0.0
    """Seconds more for each step because workers start anew with every pass over the data; not in `step`."""

    @property
    def wait_share(self) -> float:
        return self.wait / self.step if self.step > 0 else 0.0

    @property
    def computing(self) -> float:
        return self.step - self.wait

    @property
    def most_workers(self) -> int:
        """As many as are worth a try: those that wait for a disk or a network need no core meanwhile."""
        return _WORKERS_A_CORE * self.cores

    @property
    def workers_needed(self) -> int:
        if not (self.at_best > 0 and math.isfinite(self.read / self.at_best)):
            return 0
        return min(self.most_workers, max(1, math.ceil(self.read / self.at_best)))

    @property
    def at_best(self) -> float:
        """Seconds of a step if workers wait side by side, and share the cores with the step where they compute."""
        busy = (self.read_cpu + self.computing * self.threads) / self.cores
        return max(self.computing, self.read / self.most_workers, busy)

    @property
    def outlasts_computing(self) -> bool:
        """Even at best it is the data that a step waits for."""
        return self.at_best > _CLEARLY_LONGER * self.computing

    def fed(self, computing: float) -> float:
        """Seconds of a step that computes this long: beside its workers, or after reading where it has none."""
        return max(computing, self.read / self.workers) if self.workers else computing + self.wait


@dataclass(frozen=True)
class Race:
    """Seconds of a step on a fixed batch in strict fp32 and in the precision asked for."""

    fp32: float
    asked: float
    speedup: float
    low: float
    high: float
    pairs: int
    own_fp32: float | None = None
    """In fp32 as the case's own code has set torch's switches; None where they are strict."""


@dataclass(frozen=True)
class Facts:
    """Everything that was measured; what was not is None."""

    asked: str
    format: str
    kind: str
    """Of device."""
    native: bool = True
    why: str = ""
    """The fact that decides whether the format is native."""
    instead: str = "fp32"
    """What the device computes in natively."""
    own_code: bool = True
    subject: tuple[str, ...] = ()
    """What the command was given; empty for objects in Python."""
    device: str | None = None
    """As it was asked for."""
    seconds: float = 60.0
    """How long it was to measure, about."""
    skipped: tuple[str, ...] = ()
    """Stages that were not measured."""
    idle: str = ""
    """Why the steps did not train, so that their times say nothing; empty where they did."""
    fp32_means: str = "ieee"
    """How fp32 is multiplied as the case's own code has set torch's switches."""
    passed_over: bool = False
    """Nothing was timed, because a run would not take this precision here."""
    compiles: bool = False
    warming: Warming | None = None
    race: Race | None = None
    kernels: Kernels | None = None
    fp32_kernels: Kernels | None = None
    work: Work | None = None
    misaligned: tuple[Misaligned, ...] = ()
    feeding: Feeding | None = None

    @property
    def narrow(self) -> bool:
        return self.format not in ("fp32", "tf32", "fp64")

    @property
    def speed(self) -> Race | None:
        """The race, if it had pairs enough for a claim."""
        return self.race if self.race is not None and self.race.pairs >= FEWEST_FOR_INTERVAL else None

    @property
    def waiting(self) -> float:
        return self.feeding.wait_share if self.feeding else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Of a step with its data, by part; empty where it is not known. They add up to 1."""
        if self.kernels is None:
            return {}
        return {DATA: self.waiting, **{part: share * (1 - self.waiting) for part, share in self.kernels.shares.items()}}

    @property
    def ceiling(self) -> float | None:
        """Times as fast as strict fp32 if matrix work took no time at all, as Amdahl reckons it."""
        return amdahl(self.fp32_kernels.matrix) if self.fp32_kernels else None

    @property
    def ceiling_with_data(self) -> float | None:
        if self.fp32_kernels is None or self.race is None or self.feeding is None:
            return self.ceiling
        least = self.feeding.fed(self.race.fp32 * (1 - self.fp32_kernels.matrix))
        return self.feeding.fed(self.race.fp32) / least if least > 0 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shares": self.shares, "ceiling": self.ceiling, "speedup_with_data": self.with_data}

    @property
    def with_data(self) -> float | None:
        """The speed-up that is left when both wait for the same data; None where it is not known."""
        if self.speed is None or self.feeding is None:
            return None
        asked = self.feeding.fed(self.speed.asked)
        return self.feeding.fed(self.speed.fp32) / asked if asked > 0 else None


def amdahl(share: float) -> float:
    """Times as fast if the work that takes this share of the time took none."""
    return 1 / (1 - share) if share < 1 else float("inf")


_NESTED: dict[str, Any] = {
    "warming": Warming,
    "race": Race,
    "kernels": Kernels,
    "fp32_kernels": Kernels,
    "work": Work,
    "feeding": Feeding,
}


def read_facts(known: Mapping[str, Any]) -> Facts:
    """From what a process has answered; words that are no facts are left alone."""
    given = {name.name: known[name.name] for name in fields(Facts) if name.name in known}
    for name, kind in _NESTED.items():
        if given.get(name) is not None:
            given[name] = _read(kind, given[name])
    given["misaligned"] = tuple(_read(Misaligned, one) for one in given.get("misaligned", ()))
    for name in ("subject", "skipped"):
        given[name] = tuple(given.get(name, ()))
    return Facts(**given)


def _read(kind: Any, known: Mapping[str, Any]) -> Any:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    if plain.get("warming") is not None:
        plain["warming"] = _read(Warming, plain["warming"])
    return kind(**plain)
