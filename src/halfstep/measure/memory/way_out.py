"""After a step that ran out of memory: its estimated memory, the memory that is there, the largest batch that fits.

It runs as a program in its own process: where memory is exhausted, even loading a library may fail.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from halfstep.host_memory import read_free_memory
from halfstep.measure.memory.devices import HERE, Target, device_named
from halfstep.measure.memory.estimate import estimate_device_ledger
from halfstep.measure.memory.fake_tensors import MakeCase, build_case_factory
from halfstep.measure.memory.fitting import find_largest_batch
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject

NEAR = 0.1
"""Relative tolerance of the search for the largest batch; the user is waiting for it."""


@dataclass(frozen=True)
class StepOutOfMemory:
    """A step that ran out of memory: the argument of this program, as JSON."""

    recipe: str
    settings: tuple[str, ...]
    precision: str
    batch: int
    limit: int


@dataclass(frozen=True)
class MemoryRemedy:
    """The remedy for a step that ran out of memory."""

    at_peak: Mapping[str, int]
    """The ledger of the step that failed: bytes of each part at its peak."""
    moment: str
    limit: int
    """Bytes that there are."""
    batch: int
    """The largest batch that fits by the estimate; 0 if none does."""
    recomputed: int = 0
    """The batch that fits with recomputed activations, where no batch fits otherwise."""

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def find_memory_remedy(make_case: MakeCase, precision: str, batch: int, target: Target, limit: int) -> MemoryRemedy:
    """Return a remedy for a batch that did not fit into `limit` bytes; the case and its ledgers are made once."""
    make_case, case = build_case_factory(make_case)
    setting = replace(case.setting, precision=precision, batch=batch)
    made: dict[StepSetting, Ledger] = {}

    def ledger(make: MakeCase, wanted: StepSetting) -> Ledger:
        if wanted not in made:
            made[wanted] = estimate_device_ledger(make, wanted, target)
        return made[wanted]

    failed = ledger(make_case, setting)
    fit = find_largest_batch(make_case, setting, limit, ledger, tolerance=NEAR)
    if fit.batch or setting.recompute:
        return MemoryRemedy(failed.at_peak, failed.moment, limit, fit.batch)
    again = ledger(make_case, replace(setting, batch=fit.ledger.samples, recompute=True))
    return MemoryRemedy(failed.at_peak, failed.moment, limit, 0, again.samples if again.peak <= limit else 0)


def compute_usable_memory(target: Target) -> int:
    """Return the bytes that tensors of this process can use now: the device's memory, less what others hold."""
    found = [target.usable]
    with contextlib.suppress(Exception):  # a limit applies only where it can be read
        if target.device.kind == "cpu":
            found += _list_free_memory(target)
        else:
            free, _ = torch.accelerator.get_memory_info()
            # Reserved memory is the caching allocator's, so this process can reuse it.
            found.append(int(free) + int(torch.accelerator.memory_reserved()))
    return max(0, min(found))


def _list_free_memory(target: Target) -> Iterator[int]:
    """Yield free memory plus what this process holds, without its code: the process can reuse what it has freed."""
    import psutil

    process = psutil.Process().memory_info()
    own = int(process.rss) - target.reserved
    free = read_free_memory()
    if free is not None:
        yield free + own
    with contextlib.suppress(ImportError):  # Windows
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            # This limit is on address space, so the virtual size is subtracted, not the resident one.
            yield most - int(process.vms) + own


def _print_memory_remedy() -> None:
    failed = StepOutOfMemory(**json.loads(sys.argv[1]))
    wanted = Subject(failed.recipe, tuple(failed.settings))
    print(
        json.dumps(
            asdict(find_memory_remedy(wanted.open, failed.precision, failed.batch, device_named(HERE), failed.limit))
        )
    )


if __name__ == "__main__":
    _print_memory_remedy()
