"""Describe where a checkpoint was made: bitwise equal results hold only in the same environment."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from halfstep._version import __version__
from halfstep.errors import same_keys
from halfstep.precision import flags
from halfstep.precision.hardware import describe
from halfstep.recipe.strict_yaml import flat

INDIFFERENT = ("halfstep",)
"""Facts that are recorded but do not affect the bits."""
PREPARING = ("numpy", "pillow", "torchvision")
"""Packages that read and augment samples."""


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, device, threads and torch flags that the bits of a run depend on."""
    return {
        # Recorded for the reader of a checkpoint; see INDIFFERENT.
        "halfstep": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": describe(str(device)).name,
        # Reductions on the CPU split by thread, so the number of threads changes the order of the sums.
        "threads": torch.get_num_threads(),
        "flags": flags.read_flags(),
        "packages": {name: _version(name) for name in PREPARING},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, in words, why a resume is not exact; an empty list where it is."""
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


# -- measured ---------------------------------------------------------------------------------------------------------
# Values that are measured once, when a run begins: measured again, they could differ.


@dataclass(frozen=True)
class AutoChoices:
    """Decisions that depend on timing."""

    precision: str
    """The precision that was requested, or that `auto` resolved to."""
    reasons: tuple[str, ...]
    """Why it was chosen, in words."""
    workers: int
    plan: Mapping[str, Any] | None = None
    """Other measured choices, by name."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {**asdict(self), "reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> AutoChoices:
        """Build it from `as_dict`; raise StateMismatch where keys differ."""
        same_keys("what was measured", [*cls.__dataclass_fields__], state)
        return cls(**{**state, "reasons": tuple(state["reasons"])})
