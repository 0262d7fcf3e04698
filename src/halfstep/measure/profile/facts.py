"""The measurements of a profile as plain data, from which causes are found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.json_data import JsonResult

NARROW, WIDE, COPIES, UPDATE, OTHER, HOST, DATA = "narrow", "fp32", "copies", "update", "other", "host", "data"
PARTS = {
    DATA: "waiting for data",
    HOST: "Python and dispatch",
    COPIES: "casts and layout copies",
    NARROW: "matrix work in narrow formats",
    WIDE: "matrix work in fp32",
    OTHER: "other operations",
    UPDATE: "the optimizer's update",
}
"""The uses of a step's time; their shares add up to 1."""
# More than one, because workers that wait for I/O use no core.
_WORKERS_A_CORE = 4
_CLEARLY_LONGER = 1.25


@dataclass(frozen=True)
class Warming:
    """The first steps: the time of each, and the part of it spent compiling."""

    seconds: tuple[float, ...]
    compiled: tuple[int, ...]
    """Graphs compiled in each step."""
    compiling: tuple[float, ...]
    """Seconds of each step spent compiling."""
    reason: str = ""
    """torch's reason for the last recompile."""


@dataclass(frozen=True)
class KernelTimes:
    """The time of a step on a fixed batch, by part; the shares add up to 1."""

    shares: Mapping[str, float]
    convolutions: float = 0.0
    """Share of convolutions in a narrow format, which is part of `narrow`."""
    top: Mapping[str, float] = field(default_factory=dict)
    """The most expensive operations, with their format."""
    other: Mapping[str, float] = field(default_factory=dict)
    """The most expensive operations of `other`."""
    code: Mapping[str, float] = field(default_factory=dict)
    """Lines of the user's code that kept the host busy or waiting between operations; part of `host`."""

    @property
    def matrix(self) -> float:
        """Return the share of matrix work in any format."""
        return self.shares.get(NARROW, 0.0) + self.shares.get(WIDE, 0.0)


@dataclass(frozen=True)
class FlopsByFormat:
    """FLOPs of a step by format, and the modules that stand out."""

    by_format: Mapping[str, int]
    wide: Mapping[str, int]
    """FLOPs in fp32 by module, largest first."""
    islands: tuple[str, ...] = ()
    """Modules declared to stay in fp32."""

    @property
    def total(self) -> int:
        """Return the FLOPs in all formats."""
        return sum(self.by_format.values())

    @property
    def fp64_share(self) -> float:
        """Return the share of FLOPs in fp64."""
        return self.by_format.get("fp64", 0) / self.total if self.total else 0.0

    @property
    def wide_share(self) -> float:
        """Return the share of FLOPs in fp32."""
        return sum(self.wide.values()) / self.total if self.total else 0.0


@dataclass(frozen=True)
class MisalignedLayer:
    """A layer whose channels are not a multiple of 8, timed as it is and padded to the next multiple."""

    names: tuple[str, ...]
    """Names of all identical layers."""
    channels: str
    padded: str
    flops_share: float
    seconds: float
    """Seconds of forward and backward of one of them."""
    padded_seconds: float
    low: float
    high: float
    """Upper end of the 95 % interval of the padded layer's speed-up."""
    kind: str = ""
    """The type of the layer."""

    @property
    def saved(self) -> float:
        """Return the seconds saved per step; 0 if both may be equally fast."""
        return max(0.0, self.seconds - self.padded_seconds) * len(self.names) if self.low > 1.0 else 0.0


@dataclass(frozen=True)
class Feeding:
    """Steps on batches as training reads them."""

    step: float
    """Seconds of a step, including the wait."""
    wait: float
    """Seconds of waiting for a batch."""
    read: float
    """Seconds for one process to read the batches of one step."""
    read_cpu: float
    """CPU seconds of `read`; the rest is waiting for I/O."""
    workers: int
    cores: int
    threads: int
    """Cores that the step itself keeps busy."""
    warming: Warming | None = None
    restarting: float = 0.0
    """Extra seconds per step because workers restart with every pass over the data; not in `step`."""

    @property
    def wait_share(self) -> float:
        """Return the share of a step spent waiting."""
        return self.wait / self.step if self.step > 0 else 0.0

    @property
    def computing(self) -> float:
        """Return the seconds of a step spent computing."""
        return self.step - self.wait

    @property
    def most_workers(self) -> int:
        """Return the most workers worth trying: while they wait for a disk or a network they need no core."""
        return _WORKERS_A_CORE * self.cores

    @property
    def workers_needed(self) -> int:
        """Return the number of workers that reads fast enough for `at_best`."""
        if not (self.at_best > 0 and math.isfinite(self.read / self.at_best)):
            return 0
        return min(self.most_workers, max(1, math.ceil(self.read / self.at_best)))

    @property
    def at_best(self) -> float:
        """Return the seconds of a step if workers wait in parallel and share the cores with the step."""
        # The step's own threads compete with the workers for the cores.
        busy = (self.read_cpu + self.computing * self.threads) / self.cores
        return max(self.computing, self.read / self.most_workers, busy)

    @property
    def outlasts_computing(self) -> bool:
        """Return whether a step waits for data even at best."""
        return self.at_best > _CLEARLY_LONGER * self.computing

    def fed(self, computing: float) -> float:
        """Return the seconds of a step that computes this long, in parallel with its workers or after reading."""
        return max(computing, self.read / self.workers) if self.workers else computing + self.wait


ANOMALY, THREADS = "anomaly mode", "torch threads"


@dataclass(frozen=True)
class SlowSwitch:
    """A setting of torch that the case's own code has left on, timed with and without it."""

    name: str
    value: str
    seconds: float
    without: float
    """Seconds of a step without it."""
    low: float
    high: float
    """Upper end of the 95 % interval of the speed-up without it."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on a fixed batch in strict fp32 and in the requested precision."""

    fp32: float
    asked: float
    speedup: float
    low: float
    high: float
    pairs: int
    own_fp32: float | None = None
    """Seconds in fp32 with torch's flags as the case's own code has set them; None if those are strict."""


@dataclass(frozen=True)
class ProfileFacts(JsonResult):
    """Everything that was measured; the rest is None."""

    asked: str
    format: str
    kind: str
    """The kind of device."""
    native: bool = True
    why: str = ""
    """The fact that decides whether the format is native."""
    instead: str = "fp32"
    """A format in which the device computes natively."""
    own_code: bool = True
    subject: tuple[str, ...] = ()
    """The arguments of the command; empty for objects in Python."""
    device: str | None = None
    """The device as requested."""
    seconds: float = 60.0
    """The approximate time of the measurement."""
    skipped: tuple[str, ...] = ()
    """Stages that were not measured."""
    idle: str = ""
    """Why the steps did not train, so that their times are meaningless; empty if they did."""
    fp32_means: str = "ieee"
    """How fp32 is multiplied with torch's flags as the case's own code has set them."""
    passed_over: bool = False
    """Whether nothing was timed, because a run would not use this precision here."""
    compiles: bool = False
    warming: Warming | None = None
    race: StepTimes | None = None
    kernels: KernelTimes | None = None
    fp32_kernels: KernelTimes | None = None
    work: FlopsByFormat | None = None
    misaligned: tuple[MisalignedLayer, ...] = ()
    switches: tuple[SlowSwitch, ...] = ()
    feeding: Feeding | None = None

    @property
    def narrow(self) -> bool:
        """Return whether the format is narrower than fp32."""
        return self.format not in ("fp32", "tf32", "fp64")

    @property
    def speed(self) -> StepTimes | None:
        """Return the race if it has enough pairs for a claim."""
        return self.race if self.race is not None and self.race.pairs >= FEWEST_FOR_INTERVAL else None

    @property
    def waiting(self) -> float:
        """Return the share of a step spent waiting for data."""
        return self.feeding.wait_share if self.feeding else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of a step with its data, by part; empty if unknown. They add up to 1."""
        if self.kernels is None:
            return {}
        # The kernels were measured on a fixed batch, without any wait.
        return {DATA: self.waiting, **{part: share * (1 - self.waiting) for part, share in self.kernels.shares.items()}}

    @property
    def ceiling(self) -> float | None:
        """Return the speed-up over strict fp32 if matrix work took no time, by Amdahl's law."""
        return compute_amdahl_speedup(self.fp32_kernels.matrix) if self.fp32_kernels else None

    @property
    def ceiling_with_data(self) -> float | None:
        """Return the ceiling with the wait for data included."""
        if self.fp32_kernels is None or self.race is None or self.feeding is None:
            return self.ceiling
        # Both steps wait for the same data, which limits the gain further.
        least = self.feeding.fed(self.race.fp32 * (1 - self.fp32_kernels.matrix))
        return self.feeding.fed(self.race.fp32) / least if least > 0 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: the fields, and the figures that follow from them."""
        more = {"shares": self.shares, "ceiling": self.ceiling, "speedup_with_data": self.with_data}
        return {**super().as_dict(), **more}

    @property
    def with_data(self) -> float | None:
        """Return the speed-up that remains when both wait for the same data; None if unknown."""
        if self.speed is None or self.feeding is None:
            return None
        asked = self.feeding.fed(self.speed.asked)
        return self.feeding.fed(self.speed.fp32) / asked if asked > 0 else None


def compute_amdahl_speedup(share: float) -> float:
    """Return the speed-up if the work with this share of the time took none."""
    return 1 / (1 - share) if share < 1 else float("inf")


_NESTED = {
    "warming": Warming,
    "race": StepTimes,
    "kernels": KernelTimes,
    "fp32_kernels": KernelTimes,
    "work": FlopsByFormat,
    "feeding": Feeding,
}


def build_profile_facts(known: Mapping[str, Any]) -> ProfileFacts:
    """Return the facts from a child's answers; other keys are ignored."""
    given = {name.name: known[name.name] for name in fields(ProfileFacts) if name.name in known}
    for name, kind in _NESTED.items():
        if given.get(name) is not None:
            given[name] = _build_from_json(kind, given[name])
    given["misaligned"] = tuple(_build_from_json(MisalignedLayer, one) for one in given.get("misaligned", ()))
    given["switches"] = tuple(_build_from_json(SlowSwitch, one) for one in given.get("switches", ()))
    for name in ("subject", "skipped"):
        given[name] = tuple(given.get(name, ()))
    return ProfileFacts(**given)


def _build_from_json(kind: Any, known: Any) -> Any:
    # JSON has no tuples.
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    if plain.get("warming") is not None:
        plain["warming"] = _build_from_json(Warming, plain["warming"])
    return kind(**plain)
