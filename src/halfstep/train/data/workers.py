"""How many processes should read samples: measured once, in a few seconds, and said in words."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice

from halfstep.train.data.loader import Gather
from halfstep.train.data.order import Order, Share
from halfstep.train.data.samples import Samples
from halfstep.train.data.source import Collate

LONGEST = 3.0
"""Seconds that the measurement may take, but for the batch that it is in."""
MOST = 16
NOTHING = 0.002
"""Seconds for a batch under which handing it from one process to another costs as much as reading it."""
FAST_STEP = 0.05
"""Seconds: reading should keep up with steps as short as this."""


@dataclass(frozen=True)
class Pace:
    """What it takes to read a batch in this process."""

    seconds: float
    waiting: float
    """The share of it in which the processor waited for a disk or a network."""


def choose_workers(
    samples: Samples, order: Order, collate: Collate, batch_size: int, *, cores: int, computes_on_cores: bool
) -> tuple[int, str]:
    """The number for each device, and the reason. `cores` are those that this device may use."""
    pace = measured(samples, order, collate, batch_size)
    return chosen(pace, cores, computes_on_cores)


def chosen(pace: Pace, cores: int, computes_on_cores: bool) -> tuple[int, str]:
    took = f"a batch takes {pace.seconds * 1e3:.3g} ms to read"
    if pace.seconds < NOTHING:
        return 0, f"{took}, less than to hand it over from another process"
    if computes_on_cores:
        return _beside_the_training(pace, cores, took)
    wanted = max(2, round(pace.seconds / FAST_STEP + 0.5))
    workers = max(1, min(wanted, cores - 1, MOST))
    limit = f", of {wanted} that would keep up with steps of {FAST_STEP * 1e3:.0f} ms" if workers < wanted else ""
    return workers, f"{took}, and there are {cores} cores{limit}"


def _beside_the_training(pace: Pace, cores: int, took: str) -> tuple[int, str]:
    if pace.waiting > 0.5:
        return min(2, max(1, cores)), f"{took}, {pace.waiting:.0%} of it waiting for the disk"
    if cores < 4:
        return 0, f"{took}, and the training itself wants the {cores} core{'s' * (cores != 1)}"
    workers = min(4, cores // 4)
    return workers, f"{took}, and the training leaves {workers} of {cores} cores for it"


def measured(samples: Samples, order: Order, collate: Collate, batch_size: int) -> Pace:
    """The median batch of the first epoch's first few; the very first one, which warms up, is not counted."""
    gather = Gather(collate, samples.seed)
    batches = Share(batch_size).batches(order.numbers(0))
    times: list[tuple[float, float]] = []
    begin = time.perf_counter()
    for batch in islice(batches, 12):
        wall, busy = time.perf_counter(), time.process_time()
        gather(samples.__getitems__([(0, number) for number in batch]))
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        times.append((wall, max(0.0, 1.0 - busy / wall)))
        if time.perf_counter() - begin > LONGEST:
            break
    counted = sorted(times[1:] or times)
    return Pace(*counted[len(counted) // 2])
