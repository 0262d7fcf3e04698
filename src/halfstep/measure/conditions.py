"""The conditions of a measurement; every reported figure includes them."""

from __future__ import annotations

import os
import platform

import torch
from typing_extensions import TypedDict  # pydantic, which reads them again, takes no other before Python 3.12

from halfstep._version import __version__
from halfstep.launch_variables import count_cores
from halfstep.precision.flags import read_fp32_flags
from halfstep.precision.hardware import describe_device

_ELSEWHERE = {"cpu": ("cuda.", "cudnn."), "cuda": ("mkldnn.",)}
"""Prefixes of the flags that have no effect on a device of this kind."""
_QUIET = 0.7
"""Load average per core up to which a machine counts as idle."""


class Conditions(TypedDict, total=False):
    """Device, versions, threads, flags that affect fp32 arithmetic, and load of the machine; files may lack some."""

    device: str
    place: str
    driver: str
    halfstep: str
    torch: str
    python: str
    threads: int
    cores: int
    load: float | None
    """Load average of the last minute; None on Windows, which has none."""
    flags: dict[str, str]
    arms: str
    """How a plan ran its candidates."""
    precision: dict[str, dict[str, str]]
    """As in a journal: the kind of fp8 of each converted layer; of the candidates of a bench only."""


def collect_conditions(device: torch.device | str | None = None) -> Conditions:
    """Return the conditions as they are now."""
    here = describe_device(device)
    return {
        "device": here.name,
        "place": here.place,
        "driver": here.driver,
        "halfstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": count_cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "flags": read_fp32_flags(),
    }


def describe_conditions(found: Conditions) -> str:
    """Return the conditions as one line of text."""
    flags = describe_active_flags(found)
    return (
        f"{found['device']}, torch {found['torch']}, {found['threads']} threads on {found['cores']} cores, "
        f"load {found['load']}; {flags}"
    )


def describe_active_flags(found: Conditions) -> str:
    """Return the flags that affect the device, as text."""
    kind = str(found.get("place", "")).partition(":")[0]
    elsewhere = _ELSEWHERE.get(kind, ())
    return ", ".join(f"{name} {value}" for name, value in found["flags"].items() if not name.startswith(elsewhere))


def describe_load_problem(found: Conditions) -> str:
    """Return a warning if other work was running before the measurement; empty if not, or if the load is unknown."""
    load, cores = found.get("load"), found.get("cores")
    if load is None or not cores or load <= _QUIET * cores:
        return ""
    return (
        f"load {load:.1f} on {cores} cores before measuring began: other work disturbs these figures; "
        "run it again when the machine is idle"
    )
