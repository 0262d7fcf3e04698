"""Check whether the installed torch can use the GPU present: its build, its kernels, and the driver."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.finding import Finding

Version = tuple[int, int]

WITH_BF16 = (11, 0)
"""The first CUDA version whose libraries support bf16."""
_WHEELS: tuple[tuple[Version, Version], ...] = (((13, 0), (7, 5)), ((12, 8), (7, 5)), ((12, 6), (5, 0)))
"""CUDA versions of published torch wheels, newest first, each with the oldest compute capability it has kernels for."""
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
_AMD_GPU = Path("/dev/kfd")


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as its driver reports it, whether or not torch sees it."""

    name: str
    capability: Version | None = None


@dataclass(frozen=True)
class TorchBuild:
    """The facts: what torch was built for, and what the machine has."""

    torch: str
    cuda: Version | None = None
    """None if torch was built without CUDA."""
    other: str = ""
    """ROCm or XPU, where torch was built for one of them."""
    architectures: tuple[str, ...] = ()
    """In torch's names: sm_90 is a compiled kernel, compute_90 is PTX that the driver compiles for newer GPUs."""
    driver: Version | None = None
    """The newest CUDA the driver supports; None without a driver, or where it does not report it."""
    boards: tuple[DriverGpu, ...] = field(default=())
    hidden: bool = False
    """Whether CUDA_VISIBLE_DEVICES hides every GPU."""
    works: bool = False
    """Whether torch finds a GPU: NVIDIA's compatibility package lets an older driver run a newer CUDA."""

    def as_dict(self) -> dict[str, str]:
        """Return the facts in words, without those that are absent."""
        facts = {
            "torch": self.torch,
            "built for": f"CUDA {_format_version(self.cuda)}" if self.cuda else self.other or "CPUs only",
            "architectures": " ".join(self.architectures),
            "driver runs": f"CUDA {_format_version(self.driver)}" if self.driver else "",
            "GPUs": ", ".join(_describe_gpu(board) for board in self.boards),
        }
        return {key: words for key, words in facts.items() if words}


def check_build(build: TorchBuild) -> list[Finding]:
    """Return findings on what keeps torch from using a GPU, with the fix; none where all is well."""
    return [
        finding
        for check in (_find_cpu_build, _find_hidden_gpus, _find_old_driver, _find_old_cuda, _find_missing_kernels)
        for finding in check(build)
    ]


def _find_cpu_build(build: TorchBuild) -> Iterator[Finding]:
    if build.boards and build.cuda is None and not build.other:
        evidence = f"torch {build.torch} is a CPU build, but there is {_name_gpus(build)}: everything runs on the CPU"
        yield Finding("wheel.cpu_only", "error", evidence, _suggest_install(build))


def _find_hidden_gpus(build: TorchBuild) -> Iterator[Finding]:
    if build.boards and build.cuda and build.hidden:
        evidence = f"CUDA_VISIBLE_DEVICES hides {_name_gpus(build)}"
        yield Finding("wheel.gpu_hidden", "warning", evidence, "unset CUDA_VISIBLE_DEVICES, or name a GPU in it")


def _find_old_driver(build: TorchBuild) -> Iterator[Finding]:
    # CUDA's minor-version compatibility: within one major version a newer toolkit runs on an older driver.
    if build.cuda and build.driver and build.driver[0] < build.cuda[0] and not build.works:
        evidence = (
            f"torch {build.torch} is built for CUDA {_format_version(build.cuda)}, and the driver runs CUDA "
            f"{_format_version(build.driver)} at most: torch finds no GPU"
        )
        yield Finding(
            "wheel.driver_too_old", "error", evidence, f"install a newer NVIDIA driver; or {_suggest_install(build)}"
        )


def _find_old_cuda(build: TorchBuild) -> Iterator[Finding]:
    if build.cuda and build.cuda < WITH_BF16:
        evidence = f"torch {build.torch} is built for CUDA {_format_version(build.cuda)}, whose libraries have no bf16"
        yield Finding("wheel.cuda_too_old", "error", evidence, _suggest_install(build))


def _find_missing_kernels(build: TorchBuild) -> Iterator[Finding]:
    if not build.cuda or not build.architectures:
        return
    for board in build.boards:
        if board.capability and not has_kernels(board.capability, build.architectures):
            evidence = (
                f"torch {build.torch} has no kernels for {_describe_gpu(board)}; it has "
                f"{' '.join(build.architectures)}: the first operation fails with 'no kernel image is available'"
            )
            yield Finding("wheel.no_kernels", "error", evidence, _suggest_install(build))


def _suggest_install(build: TorchBuild) -> str:
    """Return the command that installs a torch for this driver and every GPU present."""
    oldest = min((board.capability for board in build.boards if board.capability), default=(99, 0))
    # Without a driver version, the newest wheel is assumed to run.
    newest = build.driver[0] if build.driver else _WHEELS[0][0][0]
    fitting = [cuda for cuda, since in _WHEELS if cuda[0] <= newest and oldest >= since]
    if not fitting:
        return "install a newer NVIDIA driver; torch's own page lists builds for other GPUs: pytorch.org/get-started"
    # pip needs the index of builds for other versions of CUDA; uv knows them by name.
    backend = "cu" + "".join(map(str, fitting[0]))
    return f"pip install uv && uv pip install --reinstall torch torchvision --torch-backend {backend}"


def has_kernels(capability: Version, architectures: Iterable[str]) -> bool:
    """Return whether a GPU of this capability can run code built for `architectures`.

    Kernels run on the same major version if not older; PTX runs on any newer GPU. sm_90a runs on exactly that GPU,
    sm_100f within its major version.
    """
    for name in architectures:
        # sm_100 is 10.0: the last digit is the minor version.
        found = re.search(r"\d+", name)
        built = divmod(int(found[0]) if found else 0, 10)
        if name.endswith("a"):
            if built == capability:
                return True
        elif built <= capability and (name.startswith("compute_") or built[0] == capability[0]):
            return True
    return False


def detect_torch_build() -> TorchBuild:
    """Return the build of this torch, and the GPUs the driver reports."""
    import os

    import torch

    other = f"ROCm {torch.version.hip}" if torch.version.hip else "XPU" if getattr(torch.version, "xpu", None) else ""
    driver, boards = _query_nvml() or (None, _read_driver_files())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    parts = (torch.version.cuda or "").split(".")
    return TorchBuild(
        torch=torch.__version__,
        cuda=(int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None,
        other=other,
        # torch.cuda.get_arch_list() is empty if no GPU is usable, which is exactly when the list matters.
        architectures=tuple((getattr(torch._C, "_cuda_getArchFlags", str)() or "").split()),
        driver=driver,
        boards=boards,
        # CUDA takes an empty list and -1 for no device.
        hidden=visible is not None and visible.strip() in ("", "-1"),
        works=torch.cuda.is_available(),
    )


def _query_nvml() -> tuple[Version | None, tuple[DriverGpu, ...]] | None:
    """Return the driver's CUDA version and GPUs from NVML; None if it is not available."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:
        # A missing package, library or driver raises different exceptions on different systems.
        return None
    return read_nvml(pynvml)


def read_nvml(nvml: Any) -> tuple[Version | None, tuple[DriverGpu, ...]]:
    """Return the driver's CUDA version and its GPUs; None for what NVML does not report."""

    def ask(question: Callable[..., Any], *about: Any) -> Any:
        try:
            return question(*about)
        except nvml.NVMLError:
            return None

    found = []
    for index in range(ask(nvml.nvmlDeviceGetCount) or 0):
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is not None:
            capability = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
            name = ask(nvml.nvmlDeviceGetName, handle) or "an NVIDIA GPU"
            # Older versions of pynvml return bytes.
            text = name.decode() if isinstance(name, bytes) else str(name)
            found.append(DriverGpu(text, tuple(capability) if capability else None))
    version = ask(nvml.nvmlSystemGetCudaDriverVersion)
    # NVML encodes 12.8 as 12080.
    return (version // 1000, version % 1000 // 10) if version else None, tuple(found)


def _read_driver_files() -> tuple[DriverGpu, ...]:
    """Return GPUs without NVML: from the NVIDIA driver's /proc entries, or the presence of AMD's device file."""
    found = []
    for place in sorted(_NVIDIA_DRIVER.glob("*/information")) if _NVIDIA_DRIVER.is_dir() else ():
        # The file has lines such as "Model:  NVIDIA A100".
        lines = dict(line.partition(":")[::2] for line in place.read_text(errors="replace").splitlines())
        found.append(DriverGpu(lines.get("Model", "").strip() or "an NVIDIA GPU"))
    return tuple(found) or ((DriverGpu("an AMD GPU"),) if _AMD_GPU.exists() else ())


def _format_version(version: Version | None) -> str:
    return ".".join(map(str, version or ()))


def _describe_gpu(board: DriverGpu) -> str:
    return board.name + (f" (sm_{board.capability[0]}{board.capability[1]})" if board.capability else "")


def _name_gpus(build: TorchBuild) -> str:
    return ", ".join(_describe_gpu(board) for board in build.boards)
