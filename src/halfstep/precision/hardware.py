"""Describe the devices of this machine, from the hardware and its driver."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import WrongUse, unknown_name
from halfstep.precision.capability import Device

CPUINFO = Path(os.environ.get("HALFSTEP_CPUINFO", "/proc/cpuinfo"))
"""Another file describes another CPU: tests use it to run in bf16 on machines that only emulate it."""
AMD_DRIVER = Path("/sys/module/amdgpu/version")


def describe(device: torch.device | str | None = None) -> Device:
    """Return the device of this name; None means the best accelerator present, or else the CPU.

    Raises WrongUse for a device that is not present, and UnknownName for a name that torch does not know.
    """
    place = str(device if device is not None else torch.accelerator.current_accelerator(check_available=True) or "cpu")
    where = _TPU if place.split(":")[0] == "tpu" else _parse(place)
    reader = _READERS.get(where.type)
    if reader is None:
        return Device(kind="other", name=where.type, place=str(where), torch=torch.__version__)
    if where.type not in (_TPU.type, *present()):
        raise WrongUse(
            f"device {place!r} is not on this machine",
            allowed=", ".join(present()),
            do=f"leave the device out, or name {present()[0]!r}; for a GPU, check its driver and torch's build",
        )
    return reader(where)


def present() -> list[str]:
    """Return the device types that work here, the best one first."""
    # check_available: otherwise torch returns the accelerator that it was built for, present or not.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [accelerator.type, "cpu"] if accelerator else ["cpu"]


_TPU = torch.device("xla")


def _parse(place: str) -> torch.device:
    try:
        return torch.device(place)
    except RuntimeError:
        raise unknown_name("device", place, [*_READERS, "tpu"]) from None


def _cuda(where: torch.device) -> Device:
    """Describe an NVIDIA or AMD GPU: torch calls both `cuda`."""
    index = where.index if where.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise WrongUse(
            f"device {str(where)!r} is not on this machine",
            allowed=f"{torch.cuda.device_count()} of this type, numbered from 0",
            do="name one of them, or leave the number out",
        )
    facts = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    return Device(
        kind="rocm" if amd else "cuda",
        name=facts.name,
        place=f"{where.type}:{index}",
        # ROCm fills major and minor too, with numbers that are no compute capability.
        capability=None if amd else (facts.major, facts.minor),
        # Features such as `:sramecc+:xnack-` follow the architecture.
        arch=facts.gcnArchName.split(":")[0] if amd else "",
        driver=_rocm_driver() if amd else _cuda_driver(),
        torch=torch.__version__,
    )


def _rocm_driver() -> str:
    return f"HIP {torch.version.hip} {_text(AMD_DRIVER)}".strip()


def _cuda_driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"CUDA {version // 1000}.{version % 1000 // 10}, cuDNN {torch.backends.cudnn.version()}"


_XPU_ENGINES = {
    "fp16": "has_fp16",
    "xmx": "has_subgroup_matrix_multiply_accumulate",
    "xmx_tf32": "has_subgroup_matrix_multiply_accumulate_tensor_float32",
}


def _xpu(where: torch.device) -> Device:
    facts = torch.xpu.get_device_properties(where)
    return Device(
        kind="xpu",
        name=facts.name,
        place=str(where),
        isa=frozenset(engine for engine, fact in _XPU_ENGINES.items() if getattr(facts, fact, False)),
        driver=facts.driver_version,
        torch=torch.__version__,
    )


def _mps(where: torch.device) -> Device:
    version = platform.mac_ver()[0]
    return Device(
        kind="mps",
        name=_sysctl("machdep.cpu.brand_string") or "Apple GPU",
        place=str(where),
        macos=tuple(int(part) for part in version.split(".") if part.isdigit()),
        driver=f"macOS {version}",
        torch=torch.__version__,
    )


def _cpu(where: torch.device) -> Device:
    name, isa = _READ_CPU.get(sys.platform, lambda: ("", frozenset()))()
    told = _told_by_torch()
    return Device(
        kind="cpu",
        name=name or str(told.get("cpu_name") or platform.processor() or platform.machine()),
        place=str(where),
        isa=isa or frozenset(flag for flag, has in told.items() if has is True),
        torch=torch.__version__,
    )


def _linux_cpu() -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in _text(CPUINFO).splitlines():
        key, _, value = line.partition(":")
        # One block per core: the first one is enough.
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    # x86 lists `flags`, Arm `Features`. Linux writes Arm's SVE bf16 flag without an underscore.
    return fields.get("model name", ""), frozenset(flags.replace("svebf16", "sve_bf16").split())


_MACOS_FEATURES = {"bf16": "hw.optional.arm.FEAT_BF16", "fp16": "hw.optional.arm.FEAT_FP16"}


def _macos_cpu() -> tuple[str, frozenset[str]]:
    isa = frozenset(flag for flag, key in _MACOS_FEATURES.items() if _sysctl(key) == "1")
    return _sysctl("machdep.cpu.brand_string"), isa


_READ_CPU: dict[str, Callable[[], tuple[str, frozenset[str]]]] = {"linux": _linux_cpu, "darwin": _macos_cpu}


def _told_by_torch() -> Mapping[str, Any]:
    """Return what torch knows about the CPU; `get_capabilities` is newer than the oldest torch supported."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        return dict(ask())
    older = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_tile": "_is_amx_tile_supported"}
    return {flag: bool(getattr(torch.cpu, name, bool)()) for flag, name in older.items()}


def _tpu(where: torch.device) -> Device:
    return Device(kind="tpu", name="TPU", place=str(where), torch=torch.__version__)


_READERS: dict[str, Callable[[torch.device], Device]] = {
    "cuda": _cuda,
    "xpu": _xpu,
    "mps": _mps,
    "cpu": _cpu,
    "xla": _tpu,
}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _sysctl(key: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
