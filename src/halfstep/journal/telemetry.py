"""Measure the machine while it trains: host memory, device memory, and the GPU's own meters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypedDict

import torch

from halfstep.errors import MissingExtra


class GpuMeters:
    """The meters of one GPU; values that a board does not provide are None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> dict[str, float | None] | None:
        """Return shares between 0 and 1, watts and degrees Celsius; None if nothing is available."""
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        readings = {
            "utilisation": None if rates is None else rates.gpu / 100.0,
            "memory_utilisation": None if rates is None else rates.memory / 100.0,
            "power_watts": None if power is None else power / 1000.0,
            "temperature": None if temperature is None else float(temperature),
        }
        return readings if any(value is not None for value in readings.values()) else None

    def _ask(self, question: Callable[..., Any], *more: Any) -> Any:
        try:
            return question(self._handle, *more)
        except self._nvml.NVMLError:
            return None


def find_gpu(nvml: Any, properties: Any) -> GpuMeters | None:
    """Return the GPU with torch's properties, or None."""
    # Matched by UUID or PCI bus, not by index: NVML also counts GPUs that CUDA_VISIBLE_DEVICES hides.
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    for look in (_find_by_uuid, _find_by_bus):
        for handle in look(nvml, properties):
            return GpuMeters(nvml, handle)
    return None


def _find_by_uuid(nvml: Any, properties: Any) -> list[Any]:
    uuid = str(getattr(properties, "uuid", "") or "")
    # torch gives the UUID without a prefix, and NVML wants one; a MIG slice has its own.
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    return _list_nvml_handles(nvml, nvml.nvmlDeviceGetHandleByUUID, names if uuid else [])


def _find_by_bus(nvml: Any, properties: Any) -> list[Any]:
    parts: list[Any] = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in parts:
        return []
    return _list_nvml_handles(nvml, nvml.nvmlDeviceGetHandleByPciBusId, ["{:08X}:{:02X}:{:02X}.0".format(*parts)])


def _list_nvml_handles(nvml: Any, find: Callable[[bytes], Any], names: list[str]) -> list[Any]:
    found = []
    for name in names:
        try:
            found.append(find(name.encode()))
        except nvml.NVMLError:
            continue
    return found


try:
    import psutil
except ImportError as missing:
    raise MissingExtra(
        "psutil, which is not installed",
        allowed="training with the packages that read the machine's state",
        do="pip install 'halfstep[train]'",
    ) from missing


class MeterReadings(TypedDict):
    """The machine's meters: bytes of memory, and the GPU's own meters where it has any."""

    memory: dict[str, int | None]
    gpu: dict[str, float | None] | None


class Telemetry:
    """A reader of the machine's meters; it takes well under a millisecond on most machines and never raises."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device = device if present is not None and present.type == device.type else None
        self._gpu = _find_nvml_gpu(self._device) if self._device is not None else None

    def read(self) -> MeterReadings:
        """Return the fields of a speed event."""
        host = device = peak = None
        with contextlib.suppress(psutil.Error, OSError):
            host = self._process.memory_info().rss
        if self._device is not None:
            # Backends differ in what they count, and in what they raise if they do not.
            with contextlib.suppress(Exception):
                device = torch.accelerator.memory_allocated(self._device)
                peak = torch.accelerator.max_memory_allocated(self._device)
        memory = {"host_bytes": host, "device_bytes": device, "device_peak_bytes": peak}
        return {"memory": memory, "gpu": self._gpu.read() if self._gpu is not None else None}


def _find_nvml_gpu(device: torch.device) -> GpuMeters | None:
    """Return NVML's view of a device; None for other vendors, and if NVML is not available."""
    if torch.version.cuda is None:
        return None
    try:
        import pynvml  # type: ignore[import-untyped]

        return find_gpu(pynvml, torch.cuda.get_device_properties(device))
    except Exception:
        # Drivers, containers and permissions fail in many ways; training depends on none of them.
        return None
