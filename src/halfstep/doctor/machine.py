"""Check the machine: shared memory for data workers, and versions and GPUs that are known to be bad. Imports no torch.

Known defects are data: `precision/known_bad.json`, each entry with its sources.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfstep import numbers
from halfstep._version import find_package_version
from halfstep.doctor.wheel import DriverGpu, TorchBuild, check_build, detect_torch_build
from halfstep.finding import Finding
from halfstep.precision.known_bad import KnownBadEntry, read_known_bad

SHARED_MEMORY = "/dev/shm"
SMALL = 2**28
"""Bytes of shared memory below which workers fail sooner or later; containers get a quarter of this by default."""
PREFETCHED = 2
"""Batches that each worker of a DataLoader keeps ready by default."""
_LARGER = "docker run --shm-size=8g (or --ipc=host), and in Kubernetes an emptyDir with medium: Memory on /dev/shm"
_PARTS = re.compile(r"\d+")
_RANGE = re.compile(r"(>=|<=|<|>|==)([\d.]+)")


@dataclass(frozen=True)
class MachineFacts:
    """The facts: installed versions, GPUs, and shared memory."""

    packages: Mapping[str, str] = field(default_factory=dict)
    boards: tuple[DriverGpu, ...] = ()
    shared_memory: int | None = None
    """Bytes of the whole file system of shared memory; None if there is none, as on macOS and Windows."""
    apple: bool = False
    """Whether this is a Mac with an Apple processor."""


def check_machine(machine: MachineFacts, build: TorchBuild | None = None) -> list[Finding]:
    """Return findings on the machine, and on torch's build where that is given."""
    about_build = check_build(build) if build is not None else []
    found = [*about_build, *check_shared_memory(machine.shared_memory)]
    for entry in read_known_bad():
        where = _match_known_bad(entry, machine)
        if where is not None:
            sources = ", ".join(entry["sources"])
            found.append(Finding(entry["id"], entry["severity"], f"{where}: {entry['what']} ({sources})", entry["fix"]))
    return found


def check_shared_memory(size: int | None, workers: int | None = None, batch: int | None = None) -> list[Finding]:
    """Return a finding where shared memory is too small for workers; with their number and a batch's bytes, exactly."""
    if size is None or workers == 0:
        return []
    if workers is not None and batch is not None:
        needed = workers * PREFETCHED * batch
        total = numbers.format_bytes(needed)
        why = (
            f"{workers} workers keep {PREFETCHED} batches of {numbers.format_bytes(batch)} each ready, {total} together"
        )
    else:
        needed, why = SMALL, "workers of a DataLoader pass their batches through it"
    if size >= needed:
        return []
    evidence = f"{SHARED_MEMORY} has {numbers.format_bytes(size)}, and {why}: a worker is killed by a bus error"
    return [Finding("machine.shared_memory", "warning", evidence, f"{_LARGER}; or fewer workers")]


def read_machine(build: TorchBuild | None = None) -> MachineFacts:
    """Return the facts of this machine."""
    names = {str(entry["package"]) for entry in read_known_bad() if "package" in entry}
    found = {name: version for name in sorted(names) if (version := find_package_version(name))}
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return MachineFacts(found, (build or detect_torch_build()).boards, _read_shared_memory(), apple)


def is_version_within(version: str, ranges: str) -> bool:
    """Return whether a version such as `2.13.0+cu130` is within ranges such as `>=2.13,<2.14`."""
    release = _parse_release(version)
    for sign, bound in _RANGE.findall(ranges):
        other = _parse_release(bound)
        holds = {">=": release >= other, "<=": release <= other, "<": release < other, ">": release > other}
        if not holds.get(sign, release == other):
            return False
    return True


def _match_known_bad(entry: KnownBadEntry, machine: MachineFacts) -> str | None:
    """Return the version or the GPU that an entry is about; None if it does not apply."""
    if (entry.get("only_cpu") and machine.boards) or (entry.get("only_gpu") and not machine.boards):
        return None
    if entry.get("only_apple") and not machine.apple:
        return None
    where: list[str] = []
    if "gpu" in entry:
        where += [board.name for board in machine.boards if re.search(entry["gpu"], board.name)][:1]
    if "package" in entry:
        version = machine.packages.get(entry["package"])
        where += [f"{entry['package']} {version}"] if version and is_version_within(version, entry["versions"]) else []
    # An entry about a version on some GPUs needs both.
    return ", ".join(where) if len(where) == ("gpu" in entry) + ("package" in entry) else None


def _parse_release(version: str) -> tuple[int, ...]:
    # Trailing zeros are left out: 2.13 and 2.13.0 are one release.
    parts = [int(part) for part in _PARTS.findall(re.split(r"[+a-z]", version, maxsplit=1)[0])[:4]]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _read_shared_memory() -> int | None:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except (OSError, AttributeError):
        return None
    return found.f_frsize * found.f_blocks
