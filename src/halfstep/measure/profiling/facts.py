"""What a profile has measured, as plain data: what causes are found from, here or anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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

    @property
    def wait_share(self) -> float:
        return self.wait / self.step if self.step > 0 else 0.0

    @property
    def workers_needed(self) -> int:
        computing = self.step - self.wait
        for workers in range(1, self.cores):
            if self.read <= workers * computing:
                return workers
        return self.cores

    @property
    def at_best(self) -> float:
        """Seconds of a step if every core read, and computing and reading shared them without loss."""
        computing = self.step - self.wait
        return max(computing, self.read / self.cores, (self.read_cpu + computing * self.threads) / self.cores)


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
        whole = self.race.fp32 + self.feeding.wait
        return amdahl(self.fp32_kernels.matrix * self.race.fp32 / whole) if whole > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shares": self.shares, "ceiling": self.ceiling, "speedup_with_data": self.with_data}

    @property
    def with_data(self) -> float | None:
        """The speed-up that is left when both wait for the same data."""
        if self.race is None or self.feeding is None:
            return None
        return (self.race.fp32 + self.feeding.wait) / (self.race.asked + self.feeding.wait)


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
    given["subject"] = tuple(given.get("subject", ()))
    return Facts(**given)


def _read(kind: Any, known: Mapping[str, Any]) -> Any:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    if plain.get("warming") is not None:
        plain["warming"] = _read(Warming, plain["warming"])
    return kind(**plain)
