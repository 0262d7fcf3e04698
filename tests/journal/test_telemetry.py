"""The machine's meters. There is no GPU where these run: NVML is played by an object with its names."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfstep.journal.telemetry import Telemetry, find_gpu

PROPERTIES = SimpleNamespace(uuid="aaaa-1", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


class FakeNvml:
    """Two boards, the way NVML counts them, whatever CUDA_VISIBLE_DEVICES says."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception): ...

    def __init__(self, uuids: tuple[str, ...] = ("GPU-bbbb-2", "GPU-aaaa-1"), refuses: tuple[str, ...] = ()) -> None:
        self.uuids, self.refuses, self.begun = uuids, refuses, 0

    def _answer(self, question: str, answer: Any) -> Any:
        if question in self.refuses:
            raise self.NVMLError(question)
        return answer

    def nvmlInit(self) -> None:
        self.begun += 1
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        if uuid.decode() not in self.uuids:
            raise self.NVMLError("not found")
        return self.uuids.index(uuid.decode())

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> int:
        return int(self._answer("bus", {b"00000000:3B:00.0": 1, b"00000000:AF:00.0": 0}[bus]))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._answer("rates", SimpleNamespace(gpu=[7, 93][handle], memory=[1, 40][handle]))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(self._answer("power", [30_000, 211_300][handle]))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return int(self._answer("temperature", [30, 64][handle]))


SECOND_BOARD = {"utilisation": 0.93, "memory_utilisation": 0.4, "power_watts": 211.3, "temperature": 64.0}


@pytest.mark.parametrize(
    "nvml",
    [FakeNvml(), FakeNvml(("GPU-bbbb-2", "MIG-aaaa-1")), FakeNvml(uuids=("GPU-x", "GPU-y"))],
    ids=["by its uuid", "a slice of a board", "by its place on the bus"],
)
def test_the_board_is_the_one_that_torch_computes_on(nvml: FakeNvml) -> None:
    gpu = find_gpu(nvml, PROPERTIES)
    assert gpu is not None
    assert gpu.read() == SECOND_BOARD
    assert gpu.read() == SECOND_BOARD
    assert nvml.begun == 1


def test_a_board_that_cannot_be_found_is_none_rather_than_another() -> None:
    assert find_gpu(FakeNvml(uuids=(), refuses=("bus",)), PROPERTIES) is None
    assert find_gpu(FakeNvml(uuids=()), SimpleNamespace(uuid=None)) is None
    assert find_gpu(FakeNvml(refuses=("init",)), PROPERTIES) is None


def test_what_a_board_cannot_say_is_none() -> None:
    gpu = find_gpu(FakeNvml(refuses=("power", "rates")), PROPERTIES)
    assert gpu is not None
    assert gpu.read() == {**dict.fromkeys(SECOND_BOARD), "temperature": 64.0}
    silent = find_gpu(FakeNvml(refuses=("power", "rates", "temperature")), PROPERTIES)
    assert silent is not None
    assert silent.read() is None


def test_the_real_library_has_the_names_that_are_asked_for() -> None:
    import pynvml

    names = {name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))}
    assert len(names) == 8
    assert names <= set(dir(pynvml))


def test_the_memory_of_this_process() -> None:
    telemetry = Telemetry(torch.device("cpu"))
    read = telemetry.read()
    assert read["gpu"] is None
    assert read["memory"]["device_bytes"] is None
    before = read["memory"]["host_bytes"]
    # Straight from the system: the allocator may have pages left that count already.
    with mmap.mmap(-1, 64 * 2**20) as block:
        block.write(b"\1" * len(block))
        grown = telemetry.read()["memory"]["host_bytes"] - before
    assert grown > 0.8 * 64 * 2**20


def test_a_device_that_is_not_there_is_read_without_an_error() -> None:
    assert set(Telemetry(torch.device("meta")).read()) == {"memory", "gpu"}
