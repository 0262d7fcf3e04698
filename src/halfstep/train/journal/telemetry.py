"""What the machine does while it trains: memory of this process and of the device, and the GPU's own meters."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from halfstep.errors import MissingExtra
from halfstep.train.journal.nvml import Gpu, find_gpu

try:
    import psutil
except ImportError as missing:
    raise MissingExtra(
        "psutil, which is not installed",
        allowed="training with the packages that it reads the machine with",
        do="pip install halfstep[train]",
    ) from missing


class Telemetry:
    """Reads in well under a millisecond on most machines, and never raises."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device = device if present is not None and present.type == device.type else None
        self._gpu = _gpu(self._device) if self._device is not None else None

    def read(self) -> dict[str, Any]:
        """The fields `memory` and `gpu` of a speed event."""
        host = device = peak = None
        with contextlib.suppress(psutil.Error, OSError):
            host = self._process.memory_info().rss
        if self._device is not None:
            # Backends differ in what they count, and in what they raise where they do not.
            with contextlib.suppress(Exception):
                device = torch.accelerator.memory_allocated(self._device)
                peak = torch.accelerator.max_memory_allocated(self._device)
        memory = {"host_bytes": host, "device_bytes": device, "device_peak_bytes": peak}
        return {"memory": memory, "gpu": self._gpu.read() if self._gpu is not None else None}


def _gpu(device: torch.device) -> Gpu | None:
    """NVML's view of a device; None for devices of other makers, and where NVML cannot be reached."""
    if torch.version.cuda is None:
        return None
    try:
        import pynvml  # type: ignore[import-untyped]

        return find_gpu(pynvml, torch.cuda.get_device_properties(device))
    except Exception:
        # Drivers, containers and permissions fail in many ways; training needs none of them.
        return None
