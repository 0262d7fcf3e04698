"""Measure how fast a device is in each format: forward and backward of three operations, in about a second, cached."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from halfstep import clock, files
from halfstep.errors import WrongUse
from halfstep.precision.hardware import FORMAT_NAMES, Device, describe_device, find_format_support
from halfstep.precision.names import list_precision_names
from halfstep.precision.precision import Precision, resolve_precision_name, widen

SECONDS = 0.75
"""The time limit of the timed rounds; warm-up comes on top."""
HOPELESS = 5.0
"""A format that takes this many times as long as fp32 is not timed again."""
FARTHEST = 0.05
"""The largest distance from fp32, relative to the size of a result; rounding to bf16 explains a tenth of it."""
_BATCHES = 20
_BASELINE = "fp32"

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Operation = Callable[[Tensor, Tensor], Tensor]
Calls = dict[str, Callable[[], list[Tensor]]]

OPERATIONS: dict[str, Operation] = {
    "GEMM": functional.linear,
    "conv2d": partial(functional.conv2d, padding=1),
    "conv3d": partial(functional.conv3d, padding=1),
}
# Shapes of input and weight: large enough to be bound by arithmetic, small enough to fit into the second.
_ON_CPU: dict[str, Shapes] = {
    "GEMM": ((512, 512), (512, 512)),
    "conv2d": ((4, 64, 32, 32), (64, 64, 3, 3)),
    "conv3d": ((1, 32, 8, 16, 16), (32, 32, 3, 3, 3)),
}
_ON_ACCELERATOR: dict[str, Shapes] = {
    "GEMM": ((4096, 2048), (2048, 2048)),
    "conv2d": ((16, 128, 56, 56), (128, 128, 3, 3)),
    "conv3d": ((2, 64, 16, 32, 32), (64, 64, 3, 3, 3)),
}
# oneDNN runs their backward in a reference loop (see precision.py): timing that would only cost the probe its second.
_NOT_TIMED_ON_CPU = {"fp16": ("conv2d", "conv3d")}


@dataclass(frozen=True)
class Measurements:
    """The speed of each format relative to strict fp32, by operation, forward and backward together."""

    speedups: Mapping[str, Mapping[str, float]]
    failures: Mapping[str, str]
    """Formats in which some operation could not be timed, and why."""
    seconds: float
    how: str = ""
    """Conditions of the measurement that a reader should know."""
    cached: bool = False

    def combined(self, format_name: str) -> float | None:
        """Return the geometric mean over the operations; None for a format that lacks one of them."""
        ratios = list(self.speedups.get(format_name, {}).values())
        if not ratios or format_name in self.failures:
            return None
        return math.exp(sum(map(math.log, ratios)) / len(ratios))


def measure_speedups(device: Device | torch.device | str | None = None, *, fresh: bool = False) -> Measurements:
    """Return the speed-ups over strict fp32 on a device that is present; from the cache unless `fresh`.

    Raises WrongUse for the description of a device that is not present.
    """
    here = device if isinstance(device, Device) else describe_device(device)
    if not here.place:
        raise WrongUse(f"{here.name} is a description, not a device of this machine", do="measure where the device is")
    found = None if fresh else read_cached_measurements(here)
    return found or write_cached_measurements(here, _measure_on_device(here))


def _measure_on_device(here: Device) -> Measurements:
    start = time.perf_counter()
    speedups: dict[str, dict[str, float]] = {name: {} for name in (_BASELINE, *_list_candidates(here))}
    failures: dict[str, str] = {}
    if _list_candidates(here):
        where = torch.device(here.place)
        # Shielded from the caller's no_grad, inference_mode and autocast. autocast clears its cache of casts only when
        # the outermost context ends; the next format would reuse cached casts.
        plain = torch.autocast(where.type, enabled=False, cache_enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), plain, _use_one_thread():
            for operation in OPERATIONS:
                for name, speedup in _measure_operation(operation, here, where, failures).items():
                    speedups[name][operation] = speedup
    how = "on one thread" if here.kind == "cpu" else ""
    return Measurements(speedups, failures, seconds=time.perf_counter() - start, how=how)


def _list_candidates(here: Device) -> list[str]:
    """Return the formats worth timing: native ones that a run can have, and fp16 on a CPU for comparison."""
    can = [name for name in FORMAT_NAMES if name in list_precision_names() and find_format_support(here, name).native]
    slow = list(_NOT_TIMED_ON_CPU) if here.kind == "cpu" else []
    return [name for name in (*can, *slow) if name != _BASELINE]


def _measure_operation(operation: str, here: Device, where: torch.device, failures: dict[str, str]) -> dict[str, float]:
    """Return the speed-up of each candidate in one operation; empty if the device has no fp32 kernel for it."""
    shapes = (_ON_CPU if here.kind == "cpu" else _ON_ACCELERATOR)[operation]
    calls = _build_calls(operation, [_BASELINE, *_list_candidates(here)], shapes, where)
    table: Mapping[str, tuple[str, ...]] = _NOT_TIMED_ON_CPU if here.kind == "cpu" else {}
    for name in [name for name, operations in table.items() if operation in operations]:
        calls.pop(name, None)
        failures.setdefault(name, f"{operation} is not timed: it has no kernel worth timing on this device")
    once = {name: found for name, call in calls.items() if (found := _time_first_call(call, name, operation, failures))}
    if _BASELINE not in once:
        return {}
    right = once[_BASELINE].results
    for name in [name for name in once if _measure_distance(once[name].results, right) > FARTHEST]:
        failures[name] = (
            f"{operation} is wrong: {_measure_distance(once.pop(name).results, right):.2g} away from fp32, relative "
            "to its size"
        )
    ran = {name: found.seconds for name, found in once.items()}
    base = ran[_BASELINE]
    hopeless = {name: base / seconds for name, seconds in ran.items() if seconds > HOPELESS * base}
    timed = {name: calls[name] for name in ran if name not in hopeless}
    return {_BASELINE: 1.0} | hopeless | _time_pairs(timed)


def _time_pairs(calls: Calls) -> dict[str, float]:
    """Return medians over as many small batches of interleaved pairs as the time allows, on a busy machine too."""
    deadline = time.perf_counter() + SECONDS / len(OPERATIONS)
    slowdowns: dict[str, list[float]] = {name: [] for name in calls if name != _BASELINE}
    for _ in range(_BATCHES):
        for name, ratio in clock.measure_time_ratios(calls, baseline=_BASELINE, pairs=2).items():
            slowdowns[name].append(ratio.median)
        if time.perf_counter() >= deadline:
            break
    return {name: 1 / statistics.median(each) for name, each in slowdowns.items()}


def _build_calls(operation: str, names: list[str], shapes: Shapes, where: torch.device) -> Calls:
    # A separate generator: choosing a precision must not advance the run's random numbers.
    generator = torch.Generator().manual_seed(0)
    values, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(where).requires_grad_()
        for shape in shapes
    )
    run = partial(_run_forward_backward, OPERATIONS[operation], values, weight, where)
    return {name: partial(run, resolve_precision_name(name)) for name in names}


def _run_forward_backward(
    operation: Operation, values: Tensor, weight: Tensor, where: torch.device, precision: Precision
) -> list[Tensor]:
    """Return the output and the gradients of the operation."""
    with precision.scope(where):
        with precision.autocast(where):
            out = operation(values, weight)
        # Backward is included: a format can be fast in forward and have no kernel for backward, as fp16 convolutions on
        # a CPU do.
        gradients = torch.autograd.grad(widen(out).square().sum(), (values, weight))
    if where.type != "cpu":
        # Kernels are queued: without this only their launches would be timed.
        torch.accelerator.synchronize(where)
    return [out.detach(), *gradients]


class _FirstCall(NamedTuple):
    """One call of an operation: its time, and its output and gradients."""

    seconds: float
    results: list[Tensor]


def _measure_distance(found: list[Tensor], right: list[Tensor]) -> float:
    """Return the largest distance from fp32's output and gradients, relative to their size; inf for non-finite ones."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, right, strict=True)]
    far = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    return far if math.isfinite(far) else math.inf


def _time_first_call(
    call: Callable[[], list[Tensor]], name: str, operation: str, failures: dict[str, str]
) -> _FirstCall | None:
    """Return the results of a first call, which compiles and allocates, and the time of a later one; None if there is
    no kernel.
    """
    try:
        results = call()
        return _FirstCall(min(clock.measure_call_seconds(call, 1) for _ in range(2)), results)
    except RuntimeError as error:
        failures[name] = f"{operation} failed: {str(error).strip().splitlines()[0]}"
        return None


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Use one CPU thread: several threads wait for each other, and on a busy machine only that wait would be timed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# One small JSON file, which may be deleted at any time.


_VERSION = 1
_log = logging.getLogger("halfstep")


def read_cached_measurements(device: Device) -> Measurements | None:
    """Return the cached measurements of this device, driver and torch, or None."""
    return _parse_measurements(_read_entries(build_cache_path()).get(build_cache_key(device)))


def write_cached_measurements(device: Device, found: Measurements) -> Measurements:
    """Store measurements for the next run and return them; a disk that cannot be written is ignored."""
    entries = _read_entries(build_cache_path()) | {build_cache_key(device): asdict(found)}
    try:
        files.write_json(build_cache_path(), {"version": _VERSION, "entries": entries})
    except OSError as error:
        _log.debug("measurements were not saved: %s", error)
    return found


def build_cache_path() -> Path:
    """Return the path of the cache."""
    return files.find_cache_folder() / "probe.json"


def build_cache_key(device: Device) -> str:
    """Return the cache key: everything that changes the results and is known without measuring."""
    parts = [device.kind, device.name, device.driver, f"torch {device.torch}"]
    if device.kind == "cpu":
        isa = hashlib.sha256(" ".join(sorted(device.isa)).encode()).hexdigest()[:12]
        # CPUs of one model name can differ in what a virtual machine exposes, and oneDNN can be limited to an older
        # one.
        parts += [f"isa {isa}", os.environ.get("ONEDNN_MAX_CPU_ISA", "")]
    return " | ".join(part for part in parts if part)


def _read_entries(path: Path) -> dict[str, Any]:
    content = files.read_json(path)
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    entries = content.get("entries")
    return dict(entries) if isinstance(entries, dict) else {}


def _parse_measurements(entry: Any) -> Measurements | None:
    try:
        found = Measurements(
            {
                str(name): {str(op): _parse_speedup(value) for op, value in ops.items()}
                for name, ops in entry["speedups"].items()
            },
            {str(name): str(why) for name, why in entry["failures"].items()},
            float(entry["seconds"]),
            str(entry["how"]),
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return replace(found, cached=True)


def _parse_speedup(value: Any) -> float:
    if isinstance(value, bool) or not (math.isfinite(float(value)) and float(value) > 0):
        raise ValueError(f"{value!r} is not a speed-up")
    return float(value)
