"""The results of the probe, and their cache on disk: one small JSON file that may be deleted at any time."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halfstep import files
from halfstep.precision.capability import Device

_VERSION = 1
_log = logging.getLogger("halfstep")


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


def kept(device: Device) -> Measurements | None:
    """Return the cached measurements of this device, driver and torch, or None."""
    return _read(_entries(cache_file()).get(key_of(device)))


def keep(device: Device, found: Measurements) -> Measurements:
    """Store measurements for the next run and return them; a disk that cannot be written is ignored."""
    entries = _entries(cache_file()) | {key_of(device): asdict(found)}
    try:
        files.write_json(cache_file(), {"version": _VERSION, "entries": entries})
    except OSError as error:
        _log.debug("measurements were not kept: %s", error)
    return found


def cache_file() -> Path:
    """Return the path of the cache."""
    return files.cache_folder() / "probe.json"


def key_of(device: Device) -> str:
    """Return the cache key: everything that changes the results and is known without measuring."""
    parts = [device.kind, device.name, device.driver, f"torch {device.torch}"]
    if device.kind == "cpu":
        isa = hashlib.sha256(" ".join(sorted(device.isa)).encode()).hexdigest()[:12]
        # CPUs of one model name can differ in what a virtual machine exposes, and oneDNN can be told to use less.
        parts += [f"isa {isa}", os.environ.get("ONEDNN_MAX_CPU_ISA", "")]
    return " | ".join(part for part in parts if part)


def _entries(path: Path) -> dict[str, Any]:
    content = files.read_json(path)
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    entries = content.get("entries")
    return dict(entries) if isinstance(entries, dict) else {}


def _read(entry: Any) -> Measurements | None:
    try:
        found = Measurements(
            {
                str(name): {str(op): _ratio(value) for op, value in ops.items()}
                for name, ops in entry["speedups"].items()
            },
            {str(name): str(why) for name, why in entry["failures"].items()},
            float(entry["seconds"]),
            str(entry["how"]),
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return replace(found, cached=True)


def _ratio(value: Any) -> float:
    if isinstance(value, bool) or not (math.isfinite(float(value)) and float(value) > 0):
        raise ValueError(f"{value!r} is not a speed-up")
    return float(value)
