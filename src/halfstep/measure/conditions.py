"""What a figure was measured under. No figure goes without it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from halfstep import __version__
from halfstep.precision.flags import read_flags
from halfstep.precision.hardware import describe


def conditions(device: torch.device | str | None = None) -> dict[str, Any]:
    """Device, versions, threads, the switches that change what fp32 means, and how busy the machine is."""
    here = describe(device)
    return {
        "device": here.name,
        "place": here.place,
        "driver": here.driver,
        "halfstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "flags": read_flags(),
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_words(found: dict[str, Any]) -> str:
    """One line for people."""
    flags = ", ".join(f"{name} {value}" for name, value in found["flags"].items())
    return (
        f"{found['device']}, torch {found['torch']}, {found['threads']} threads on {found['cores']} cores, "
        f"load {found['load']}; {flags}"
    )
