"""What a figure was measured under. No figure goes without it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from halfstep import __version__, world
from halfstep.precision.flags import read_flags
from halfstep.precision.hardware import describe

_ELSEWHERE = {"cpu": ("cuda.", "cudnn."), "cuda": ("mkldnn.",)}
"""Switches that do not reach a device of this kind, by how their names begin."""
_QUIET = 0.7
"""Load for each core up to which a machine is as good as idle."""


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
        "cores": world.cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "flags": read_flags(),
    }


def in_words(found: dict[str, Any]) -> str:
    """One line for people."""
    flags = flags_in_words(found)
    return (
        f"{found['device']}, torch {found['torch']}, {found['threads']} threads on {found['cores']} cores, "
        f"load {found['load']}; {flags}"
    )


def flags_in_words(found: dict[str, Any]) -> str:
    """The switches that reach the device."""
    kind = str(found.get("place", "")).partition(":")[0]
    elsewhere = _ELSEWHERE.get(kind, ())
    return ", ".join(f"{name} {value}" for name, value in found["flags"].items() if not name.startswith(elsewhere))


def busy(found: dict[str, Any]) -> str:
    """A warning where other work ran when measuring began; empty where none did, or where nobody knows."""
    load, cores = found.get("load"), found.get("cores")
    if load is None or not cores or load <= _QUIET * cores:
        return ""
    return (
        f"load {load:.1f} on {cores} cores before measuring began: other work disturbs these figures; "
        "run it again when the machine is idle"
    )
