"""Compute what a run costs beside its steps: agreement, digests, saves, restarts, and the time that failures leave.

Counts follow from how halfstep does these things; each formula stands beside its figure in the report. Rates of
failure are published ones, taken as proportional to the number of GPUs. The assumptions are one table, in the report.
"""

from __future__ import annotations

from typing import Any

from halfstep.measure.scale.counting import RankCounts
from halfstep.measure.scale.layout import RankLayout
from halfstep.step.objective import AGREEMENT_BYTES
from halfstep.train.save_interval import PUBLISHED, FailureRate, between_failures, least_lost

ASSUMED = {
    "copy_to_host": 10e9,
    "sha256": 1e9,
    "disk": 1e9,
    "detection": 60.0,
    "start": 120.0,
}
"""Bytes a second of one rank for the first three; seconds for the others."""
_DESCRIPTORS, _A_PEER = 18, 1
"""File descriptors of a rank, and for each peer with one gloo group: 21, 33 and 49 on 4, 16 and 32 forked ranks."""


def upkeep(counted: RankCounts, average: int) -> dict[str, Any]:
    """Return all of it; `average` is the bytes of averaged weights on this rank."""
    layout = counted.layout
    saved = counted.weights + counted.optimizer + average + counted.buffers
    stall = saved / ASSUMED["copy_to_host"]
    restart = ASSUMED["detection"] + ASSUMED["start"] + saved / ASSUMED["disk"] + saved / ASSUMED["sha256"]
    return {
        "agreement": {"calls": int(layout.world > 1), "bytes": AGREEMENT_BYTES, "host_reads": 1},
        "digest": _digest(counted),
        "save": _save(layout, saved, stall),
        "load": {"bytes": saved, "files_a_rank": 2, "seconds": saved / ASSUMED["disk"] + saved / ASSUMED["sha256"]},
        "descriptors": _descriptors(layout),
        "restart": {"seconds": restart, "detection": ASSUMED["detection"], "start": ASSUMED["start"]},
        "goodput": [goodput(rate, layout.world, stall, restart) for rate in PUBLISHED],
        "assumed": dict(ASSUMED),
    }


def _digest(counted: RankCounts) -> dict[str, Any]:
    """Return the comparison of replicas at the end of a run: all hash their weights and share 64 letters."""
    world = counted.layout.world
    return {
        "bytes": counted.weights,
        "seconds": counted.weights / ASSUMED["sha256"],
        "shared": 64 * world if world > 1 else 0,
        "formula": "SHA-256 of this rank's weights; 64 bytes from each rank to all",
    }


def _save(layout: RankLayout, saved: int, stall: float) -> dict[str, Any]:
    return {
        "bytes": saved,
        "writers": layout.shard,
        "files": 2 * layout.world + 1,
        "fsyncs": 2 * layout.world + 3,
        "stall": stall,
        "seconds": max(saved / ASSUMED["disk"], saved / ASSUMED["sha256"]),
        "formula": "two files a rank and a manifest; an fsync for each, for the draft and for the folder above it; "
        "every byte by one writer: the ranks of the first replica; the stall is the copy to the host",
    }


def _descriptors(layout: RankLayout) -> dict[str, Any]:
    each = round(_DESCRIPTORS + _A_PEER * (layout.world - 1))
    return {
        "a_rank": each,
        "a_node": each * layout.per_node,
        "formula": f"{_DESCRIPTORS} + {_A_PEER} a peer: gloo connects all ranks with all",
    }


def goodput(rate: FailureRate, world: int, stall: float, restart: float) -> dict[str, Any]:
    """Return the save interval that loses the least (Young, Daly), and the share of time that is left for steps."""
    between = between_failures(rate, world)
    interval = least_lost(stall, between)
    lost = stall / interval + (interval / 2 + restart) / between
    return {
        "rate": rate.name,
        "source": rate.source,
        "mean_time_between_failures": between,
        "save_every": interval,
        "goodput": max(0.0, 1 - lost),
        "formula": "interval = sqrt(2 x stall x MTBF); lost = stall / interval + (interval / 2 + restart) / MTBF",
    }
