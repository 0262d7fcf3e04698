"""What NVML says of the GPU that torch computes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Gpu:
    """One GPU's meters. What a board cannot say is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> dict[str, float | None] | None:
        """Shares between 0 and 1, watts, degrees Celsius; None where nothing can be said."""
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        said = {
            "utilisation": None if rates is None else rates.gpu / 100.0,
            "memory_utilisation": None if rates is None else rates.memory / 100.0,
            "power_watts": None if power is None else power / 1000.0,
            "temperature": None if temperature is None else float(temperature),
        }
        return said if any(value is not None for value in said.values()) else None

    def _ask(self, question: Callable[..., Any], *more: Any) -> Any:
        try:
            return question(self._handle, *more)
        except self._nvml.NVMLError:
            return None


def find_gpu(nvml: Any, properties: Any) -> Gpu | None:
    """The GPU with torch's properties. Numbers would not do: NVML counts boards that CUDA_VISIBLE_DEVICES hides."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    for look in (_by_uuid, _by_bus):
        for handle in look(nvml, properties):
            return Gpu(nvml, handle)
    return None


def _by_uuid(nvml: Any, properties: Any) -> list[Any]:
    uuid = str(getattr(properties, "uuid", "") or "")
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    return _handles(nvml, nvml.nvmlDeviceGetHandleByUUID, names if uuid else [])


def _by_bus(nvml: Any, properties: Any) -> list[Any]:
    parts: list[Any] = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in parts:
        return []
    return _handles(nvml, nvml.nvmlDeviceGetHandleByPciBusId, ["{:08X}:{:02X}:{:02X}.0".format(*parts)])


def _handles(nvml: Any, find: Callable[[bytes], Any], names: list[str]) -> list[Any]:
    found = []
    for name in names:
        try:
            found.append(find(name.encode()))
        except nvml.NVMLError:
            continue
    return found
