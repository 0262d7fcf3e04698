"""Where a checkpoint was made. The same bits are promised in the same place only."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from halfstep import __version__
from halfstep.precision import flags
from halfstep.precision.hardware import describe
from halfstep.train.recipe.written import flat

INDIFFERENT = ("halfstep",)
"""Facts that are recorded, and that change no bit."""
PREPARING = ("numpy", "pillow", "torchvision")
"""Packages that samples are read and varied with."""


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "halfstep": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": describe(str(device)).name,
        "threads": torch.get_num_threads(),
        "flags": flags.read_flags(),
        "packages": {name: _version(name) for name in PREPARING},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why a resume here is not exact, in words; nothing where it is."""
    before, after = dict(flat(then)), dict(flat(now))
    keys = [key for key in dict.fromkeys([*before, *after]) if key not in INDIFFERENT]
    return [
        f"{key} was {before.get(key)}, and is {after.get(key)}" for key in keys if before.get(key) != after.get(key)
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
