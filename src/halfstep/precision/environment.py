"""Describe what the bits of a computation depend on besides its state: versions, device, threads, torch's flags."""

from __future__ import annotations

import platform

import torch

from halfstep._version import __version__, find_package_version
from halfstep.precision import flags
from halfstep.precision.hardware import describe_device

PREPARING = ("numpy", "pillow", "torchvision")
"""Packages that read and augment samples."""


def collect_environment(device: torch.device) -> dict[str, object]:
    """Return the versions, device, threads and torch flags that the bits of a run depend on."""
    return {
        # Recorded for the reader of a checkpoint; not compared.
        "halfstep": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": describe_device(str(device)).name,
        # Reductions on the CPU split by thread, so the number of threads changes the order of the sums.
        "threads": torch.get_num_threads(),
        "flags": flags.read_fp32_flags(),
        "packages": {name: find_package_version(name) for name in PREPARING},
    }
