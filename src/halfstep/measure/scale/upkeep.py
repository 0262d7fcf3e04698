"""Compute the overhead of a run besides its steps: agreement, digests, saves, restarts, and the cost of failures.

Counts follow from the implementation; each formula stands next to its figure in the report. Rates of failure are
published ones, taken as proportional to the number of GPUs. The assumptions are one table, in the report.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.measure.scale.counting import RankCounts
from halfstep.save_interval import PUBLISHED, FailureRate, compute_save_interval, estimate_failure_interval
from halfstep.step.agreement import AGREEMENT_BYTES

_DESCRIPTORS, _A_PEER = 18, 1
"""File descriptors of a rank, and for each peer with one gloo group: 21, 33 and 49 on 4, 16 and 32 forked ranks."""


@dataclass(frozen=True)
class AssumedRates:
    """Assumptions about a rank: bytes a second, then seconds."""

    copy_to_host: float = 10e9
    sha256: float = 1e9
    disk: float = 1e9
    detection: float = 60.0
    start: float = 120.0


ASSUMED = AssumedRates()


@dataclass(frozen=True)
class StepAgreement:
    """The collective with which ranks agree on a step."""

    calls: int
    bytes: int = AGREEMENT_BYTES
    host_reads: int = 1


@dataclass(frozen=True)
class ReplicaDigest:
    """The comparison of replicas at the end of a run: all hash their weights and share 64 letters."""

    bytes: int
    seconds: float
    shared: int
    formula: str = "SHA-256 of this rank's weights; 64 bytes from each rank to all"


@dataclass(frozen=True)
class SaveCost:
    """A save of all ranks."""

    bytes: int
    """The share of one writer."""
    writers: int
    files: int
    fsyncs: int
    stall: float
    """Seconds for which the training waits."""
    seconds: float
    formula: str = (
        "two files a rank and a manifest; an fsync for each, for the draft and for the folder above it; "
        "every byte by one writer: the ranks of the first replica; the stall is the copy to the host"
    )


@dataclass(frozen=True)
class LoadCost:
    """The loading of a checkpoint by one rank."""

    bytes: int
    files_a_rank: int
    seconds: float


@dataclass(frozen=True)
class DescriptorCount:
    """Open file descriptors."""

    a_rank: int
    a_node: int
    formula: str = f"{_DESCRIPTORS} + {_A_PEER} a peer: gloo connects all ranks with all"


@dataclass(frozen=True)
class RestartTime:
    """The seconds from a failure to the next step."""

    seconds: float
    detection: float
    start: float


@dataclass(frozen=True)
class Goodput:
    """The share of time that is left for steps at a rate of failure."""

    rate: str
    source: str
    mean_time_between_failures: float
    save_every: float
    goodput: float
    formula: str = "interval = sqrt(2 x stall x MTBF); lost = stall / interval + (interval / 2 + restart) / MTBF"


@dataclass(frozen=True)
class Upkeep:
    """The costs of a run in addition to its steps."""

    agreement: StepAgreement
    digest: ReplicaDigest
    save: SaveCost
    load: LoadCost
    descriptors: DescriptorCount
    restart: RestartTime
    goodput: tuple[Goodput, ...]
    assumed: AssumedRates


def compute_upkeep(counted: RankCounts, average: int) -> Upkeep:
    """Return all of it; `average` is the bytes of averaged weights on this rank."""
    layout, given = counted.layout, ASSUMED
    saved = counted.weights + counted.optimizer + average + counted.buffers
    stall, written, hashed = saved / given.copy_to_host, saved / given.disk, saved / given.sha256
    restart = given.detection + given.start + written + hashed
    digest_seconds = counted.weights / given.sha256
    each = round(_DESCRIPTORS + _A_PEER * (layout.world - 1))
    return Upkeep(
        StepAgreement(int(layout.world > 1)),
        ReplicaDigest(counted.weights, digest_seconds, 64 * layout.world if layout.world > 1 else 0),
        SaveCost(saved, layout.shard_size, 2 * layout.world + 1, 2 * layout.world + 3, stall, max(written, hashed)),
        LoadCost(saved, 2, written + hashed),
        DescriptorCount(each, each * layout.per_node),
        RestartTime(restart, given.detection, given.start),
        tuple(estimate_goodput(rate, layout.world, stall, restart) for rate in PUBLISHED),
        given,
    )


def estimate_goodput(rate: FailureRate, world: int, stall: float, restart: float) -> Goodput:
    """Return the save interval that loses the least (Young, Daly), and the share of time that is left for steps."""
    between = estimate_failure_interval(rate, world)
    interval = compute_save_interval(stall, between)
    lost = stall / interval + (interval / 2 + restart) / between
    return Goodput(rate.name, rate.source, between, interval, max(0.0, 1 - lost))
