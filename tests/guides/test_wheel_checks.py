"""Torch's build beside the GPU: described machines, of which each lacks one thing, and what is said to mend it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from halfstep.cli import doctor as command
from halfstep.cli import main
from halfstep.doctor import wheel
from halfstep.doctor.wheel import DriverGpu, TorchBuild, check_build, detect_torch_build, has_kernels, read_nvml

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
RTX4090 = DriverGpu("NVIDIA GeForce RTX 4090", (8, 9))
V100 = DriverGpu("Tesla V100-SXM2-16GB", (7, 0))
WELL = TorchBuild("2.13.0+cu130", (13, 0), architectures=CU130, driver=(13, 1), boards=(RTX4090,))


def test_a_machine_that_is_well_has_no_findings() -> None:
    assert check_build(WELL) == []
    assert check_build(TorchBuild("2.13.0+cpu")) == []  # no GPU, and none needed
    assert check_build(replace(WELL, driver=(13, 0))) == []
    assert check_build(replace(WELL, driver=(12, 8), works=True)) == []  # by NVIDIA's compatibility package
    assert check_build(replace(WELL, driver=None, boards=())) == []
    assert check_build(TorchBuild("2.13.0+rocm7", other="ROCm 7.0", boards=(DriverGpu("an AMD GPU"),))) == []


@pytest.mark.wording
@pytest.mark.parametrize(
    ("build", "found", "fix"),
    [
        (TorchBuild("2.13.0+cpu", driver=(12, 8), boards=(RTX4090,)), "wheel.cpu_only", "--torch-backend cu128"),
        (TorchBuild("2.13.0+cpu", boards=(RTX4090,)), "wheel.cpu_only", "--torch-backend cu130"),
        (TorchBuild("2.13.0+cpu", driver=(12, 4), boards=(V100,)), "wheel.cpu_only", "--torch-backend cu126"),
        (TorchBuild("2.13.0+cpu", driver=(10, 2), boards=(V100,)), "wheel.cpu_only", "newer NVIDIA driver"),
        (replace(WELL, driver=(12, 8)), "wheel.driver_too_old", "newer NVIDIA driver; or pip install"),
        (replace(WELL, boards=(V100,)), "wheel.no_kernels", "--torch-backend cu126"),
        (
            replace(WELL, boards=(DriverGpu("GeForce RTX 5090", (12, 0)),), architectures=("sm_80", "sm_90")),
            "wheel.no_kernels",
            "--torch-backend cu130",
        ),
        (
            TorchBuild("1.4.0", (10, 1), driver=(12, 8), boards=(RTX4090,)),
            "wheel.cuda_too_old",
            "--torch-backend cu128",
        ),
        (replace(WELL, hidden=True), "wheel.gpu_hidden", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_lacking_is_named_with_its_cure(build: TorchBuild, found: str, fix: str) -> None:
    (finding,) = check_build(build)
    assert finding.id == found
    assert fix in finding.fix
    assert build.boards[0].name in finding.evidence or build.torch in finding.evidence


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ("sm_86",), True),  # within a major version, upwards
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_86",), False),
        ((9, 0), ("sm_86", "compute_86"), True),  # the driver translates
        ((7, 0), ("compute_75",), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),
        ((12, 1), ("sm_120",), True),
        ((10, 3), ("sm_100",), True),
        ((12, 0), ("sm_100",), False),
    ],
)
def test_kernels_run_where_nvidia_says(capability: tuple[int, int], architectures: tuple[str, ...], runs: bool) -> None:
    assert has_kernels(capability, architectures) is runs


class Nvml:
    """As pynvml answers; what a board does not say raises."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"Tesla T4" if handle else "NVIDIA L4"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        if handle:
            raise self.NVMLError
        return 8, 9

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080


def test_the_driver_is_asked_and_may_be_silent() -> None:
    assert read_nvml(Nvml()) == ((12, 8), (DriverGpu("NVIDIA L4", (8, 9)), DriverGpu("Tesla T4")))
    silent = SimpleNamespace(NVMLError=Nvml.NVMLError, nvmlDeviceGetCount=lambda: 0)
    silent.nvmlSystemGetCudaDriverVersion = lambda: 0
    assert read_nvml(silent) == (None, ())


def test_this_torch_is_read_and_needs_no_gpu() -> None:
    import torch

    build = detect_torch_build()
    assert build.torch == torch.__version__
    assert build.cuda == (None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")[:2])))
    assert all(name.startswith(("sm_", "compute_")) for name in build.architectures)
    assert all(finding.id.startswith("wheel.") for finding in check_build(build))


@pytest.mark.wording
def test_the_page_shows_the_build_and_a_gpu_left_idle_ends_in_78(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        wheel, "detect_torch_build", lambda: TorchBuild("2.13.0+cpu", driver=(12, 8), boards=(RTX4090,))
    )
    done = CliRunner().invoke(main.build(), ["doctor"], env={"COLUMNS": "80"})
    assert done.exit_code == 78, done.output
    page = " ".join(done.output.split())
    assert "is a CPU build" in page
    assert "error wheel.cpu_only" in page
    assert "uv pip install --reinstall torch torchvision --torch-backend cu128" in page
    assert max(map(len, done.output.splitlines())) <= 80
    monkeypatch.setattr(wheel, "detect_torch_build", lambda: WELL)
    done = CliRunner().invoke(main.build(), ["doctor", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["build"]["architectures"] == " ".join(CU130)


def test_a_description_can_be_handed_in() -> None:
    report = command.examine_device("cpu", "fp32", build=replace(WELL, driver=(12, 0)))
    assert [finding.id for finding in report.findings] == ["wheel.driver_too_old"]
