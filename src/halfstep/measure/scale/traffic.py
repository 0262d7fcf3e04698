"""The links that collectives cross, and a bandwidth model of the time that they take.

Bytes by link are computed for the algorithms that move the least: a node receives its missing data once, divided among
its ranks, and distributes it internally. The time is bytes over bandwidth, both links at once. The model includes
neither latency, which is why calls are counted too, nor a busy network.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from halfstep.measure.scale.counting import AGREEMENT, BACKWARD, FORWARD, KINDS, REDUCE, Collective, RankCounts

GB = 1e9


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that one rank receives."""

    inside: float
    """Over the links of its node."""
    between: float
    """From other nodes."""

    def __add__(self, other: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(self.inside + other.inside, self.between + other.between)


@dataclass(frozen=True)
class DeviceLinks:
    """The bandwidth of one device in bytes a second, and the work that it is assumed to do."""

    inside: float
    between: float
    flops: float
    """A second: the peak times the assumed utilization."""
    utilization: float
    source: str

    def seconds(self, traffic: LinkTraffic) -> float:
        """Return the time of the slower link; both work at once."""
        return max(traffic.inside / self.inside, traffic.between / self.between)


@functools.cache
def find_device_links(device: str) -> DeviceLinks | None:
    """Return the links of a device by its short name; None if the table has none."""
    text = resources.files(__package__).joinpath("links.json").read_text(encoding="utf-8")
    table = json.loads(text)
    for row in table["links"]:
        if device in row["devices"]:
            flops = row["tflops"] * 1e12 * table["utilization"]
            return DeviceLinks(row["inside"] * GB, row["between"] * GB, flops, table["utilization"], row["source"])
    return None


def compute_link_traffic(collective: Collective) -> LinkTraffic:
    """Return what a rank receives in one collective; an all-reduce is a reduce-scatter and an all-gather."""
    group = collective.group
    times = 2 if collective.kind in (REDUCE, AGREEMENT) else 1
    whole = collective.bytes * (group.ranks - 1) / group.ranks
    between = collective.bytes * (group.nodes - 1) / group.nodes / group.in_node
    return LinkTraffic(times * (whole - between), times * between)


def sum_link_traffic(collectives: Iterable[Collective]) -> LinkTraffic:
    """Return the sum over collectives."""
    return sum((compute_link_traffic(one) for one in collectives), LinkTraffic(0, 0))


@dataclass(frozen=True)
class CollectiveTraffic:
    """The calls of one kind of collective, and the bytes that a rank receives in them, by link."""

    collective: str
    calls: int
    bytes: int
    inside: int
    between: int


def sum_traffic_by_kind(collectives: Sequence[Collective]) -> list[CollectiveTraffic]:
    """Return calls and bytes for each kind of collective that there is."""
    rows = []
    for kind in KINDS:
        some = [one for one in collectives if one.kind == kind]
        if some:
            crossed, size = sum_link_traffic(some), sum(one.bytes for one in some)
            rows.append(CollectiveTraffic(kind, len(some), size, round(crossed.inside), round(crossed.between)))
    return rows


@dataclass(frozen=True)
class StepSeconds:
    """The modeled seconds of a step."""

    computing: float
    communication: float
    exposed: float
    """The part of the communication that computing does not hide."""


def estimate_step_seconds(counted: RankCounts, links: DeviceLinks | None, microbatches: int) -> StepSeconds | None:
    """Return the modeled seconds of a step; None if the links are not known.

    FSDP2 and DDP communicate while they compute: the forward hides what comes in forward, and the backward, taken as
    twice the forward, what comes in backward.
    """
    if links is None:
        return None
    computing = counted.flops * microbatches / links.flops
    phases = {
        phase: sum_link_traffic(c for c in counted.collectives if c.phase == phase) for phase in (FORWARD, BACKWARD)
    }
    taken = {phase: links.seconds(traffic) for phase, traffic in phases.items()}
    shares = {FORWARD: computing / 3, BACKWARD: computing * 2 / 3}
    exposed = sum(max(0.0, taken[phase] - shares[phase]) for phase in phases)
    return StepSeconds(computing, sum(taken.values()), exposed)
