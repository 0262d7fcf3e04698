"""Devices: describe those of this machine, and decide which formats a device computes in natively.

The facts about a device are data, so devices that are not present can be judged too. torch's `is_bf16_supported()` is
not used anywhere: it is True on a T4, which only emulates bf16.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from halfstep.errors import WrongUse, build_unknown_name_error
from halfstep.json_data import JsonResult
from halfstep.precision.known_bad import explain_wrong_gpu_format

Kind = Literal["cuda", "rocm", "cpu", "mps", "xpu", "tpu", "other"]

FORMAT_NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Device(JsonResult):
    """A device, described by the facts that decide what it supports."""

    json_keys: ClassVar[tuple[str, ...]] = ("name", "place")
    kind: Kind
    name: str
    place: str = ""
    """The device in torch's notation, such as `cuda:0`; empty for the description of a device that is not present."""
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability."""
    arch: str = ""
    """AMD's architecture, such as gfx90a."""
    isa: frozenset[str] = frozenset()
    """A CPU's instruction sets, or an Intel GPU's matrix engines."""
    macos: tuple[int, ...] = ()
    driver: str = ""
    torch: str = ""


@dataclass(frozen=True)
class FormatSupport(JsonResult):
    """Whether a device computes in a format natively, and the fact that decides it."""

    json_keys: ClassVar[tuple[str, ...]] = ("native", "reason")
    native: bool
    reason: str
    emulated: bool = False
    """Not native, but torch computes in the format all the same: rounded as requested, and slow."""


def find_format_support(device: Device, format_name: str) -> FormatSupport:
    """Return whether `device` computes in this format natively, and why.

    A format that is known to give wrong numbers on this device is neither native nor emulated.
    """
    if device.kind == "tpu":
        return FormatSupport(False, "TPUs run through torch_xla, which is not supported here")
    if format_name == "fp32":
        return FormatSupport(True, "every device supports it")
    if format_name == "fp64":
        return _find_fp64_support(device)
    wrong = explain_wrong_gpu_format(device.name, format_name) if device.kind == "cuda" else None
    return FormatSupport(False, wrong) if wrong else _RULES[device.kind](device, format_name)


def _find_fp64_support(device: Device) -> FormatSupport:
    if device.kind == "mps":
        return FormatSupport(False, "Apple GPUs have no fp64")
    if device.kind == "xpu" and "fp64" not in device.isa:
        return FormatSupport(False, "it has no fp64 arithmetic")
    if device.kind == "other":
        return _find_other_support(device, "fp64")
    return FormatSupport(True, "it has fp64 arithmetic")


_CAST = ("bf16", "fp16")
"""The formats that torch casts to on devices without them."""
_CUDA_SINCE = {
    "tf32": ((8, 0), "there are no tf32 tensor cores", "tf32 tensor cores"),
    "bf16": ((8, 0), "bf16 is emulated", "bf16 tensor cores"),
    "fp8": ((8, 9), "there are no fp8 tensor cores", "fp8 tensor cores"),
    "mxfp8": ((10, 0), "there are no mxfp8 tensor cores", "mxfp8 tensor cores"),
}
_DOUBLE_RATE_FP16 = ((5, 3), (6, 0), (6, 2))


def _find_cuda_support(device: Device, format_name: str) -> FormatSupport:
    has = device.capability or (0, 0)
    if format_name == "fp16":
        return _find_cuda_fp16_support(has)
    if format_name == "mxfp8" and has >= (11, 0):
        return FormatSupport(
            False, f"compute capability {_format_version(has)}: torchao has mxfp8 kernels for 10.x only"
        )
    since, lack, gain = _CUDA_SINCE[format_name]
    if has >= since:
        return FormatSupport(True, f"compute capability {_format_version(has)} >= {_format_version(since)}: {gain}")
    return FormatSupport(
        False, f"compute capability {_format_version(has)} < {_format_version(since)}: {lack}", format_name == "bf16"
    )


def _find_cuda_fp16_support(has: tuple[int, int]) -> FormatSupport:
    if has >= (7, 0):
        return FormatSupport(True, f"compute capability {_format_version(has)} >= 7.0: fp16 tensor cores")
    if has in _DOUBLE_RATE_FP16:
        return FormatSupport(
            True, f"compute capability {_format_version(has)}: fp16 at double rate, without tensor cores"
        )
    # The consumer Pascal chips, between two that have fp16 at double rate: `>= 6.0` would be wrong.
    if has == (6, 1):
        return FormatSupport(False, "compute capability 6.1: fp16 runs at 1/64 of fp32's rate", emulated=True)
    return FormatSupport(False, f"compute capability {_format_version(has)} < 7.0: fp16 is emulated", emulated=True)


# By the beginning of the architecture's name; the longest match counts.
_ROCM: dict[str, tuple[frozenset[str], str]] = {
    "gfx900": (frozenset({"fp16"}), "Vega: fp16 at double rate, no bf16"),
    "gfx906": (frozenset({"fp16"}), "Vega: fp16 at double rate, no bf16"),
    "gfx908": (frozenset({"bf16", "fp16"}), "CDNA matrix cores"),
    "gfx90a": (frozenset({"bf16", "fp16"}), "CDNA 2 matrix cores"),
    "gfx94": (frozenset({"tf32", "bf16", "fp16", "fp8"}), "CDNA 3 matrix cores"),
    "gfx95": (frozenset({"bf16", "fp16", "fp8"}), "CDNA 4 matrix cores"),
    "gfx103": (frozenset({"fp16"}), "RDNA 2: fp16 at double rate, no bf16"),
    "gfx11": (frozenset({"bf16", "fp16"}), "RDNA 3 WMMA"),
    "gfx120": (frozenset({"bf16", "fp16", "fp8"}), "RDNA 4 WMMA"),
    "gfx125": (frozenset({"bf16", "fp16", "fp8"}), "MI400 WMMA"),
}


def _find_rocm_support(device: Device, format_name: str) -> FormatSupport:
    emulated = format_name in _CAST
    known = [prefix for prefix in _ROCM if device.arch.startswith(prefix)]
    if not known:
        return FormatSupport(False, f"nothing is known about {device.arch or 'this architecture'}", emulated)
    formats, what = _ROCM[max(known, key=len)]
    if format_name in formats:
        return FormatSupport(True, f"{device.arch} ({what})")
    lack = "is emulated" if emulated else "is not among its formats"
    return FormatSupport(False, f"{device.arch} ({what}): {format_name} {lack}", emulated)


_XPU_NEEDS = {
    "tf32": ("xmx_tf32", "XMX engines that take tf32"),
    "bf16": ("xmx", "XMX engines"),
    "fp16": ("fp16", "fp16 arithmetic"),
    "fp8": ("xmx_fp8", "fp8 engines"),
    "mxfp8": ("xmx_mxfp8", "mxfp8 engines"),
}


def _find_xpu_support(device: Device, format_name: str) -> FormatSupport:
    need, words = _XPU_NEEDS[format_name]
    if need in device.isa:
        return FormatSupport(True, f"it has {words}")
    # Without fp16 arithmetic SYCL refuses its kernels, and without tf32 engines fp32 would run.
    if format_name == "bf16":
        return FormatSupport(False, f"it has no {words}: bf16 is emulated", emulated=True)
    return FormatSupport(False, f"it has no {words}")


_MACOS_WITH_BF16 = (14,)


def _find_mps_support(device: Device, format_name: str) -> FormatSupport:
    if format_name == "fp16":
        return FormatSupport(True, "every Apple GPU computes in fp16")
    if format_name != "bf16":
        return FormatSupport(False, f"Apple GPUs have no {format_name}")
    if device.macos < _MACOS_WITH_BF16:
        return FormatSupport(
            False, f"macOS {_format_version(device.macos) or 'of unknown version'} < 14: Metal has no bf16"
        )
    generation = re.search(r"\bM(\d+)", device.name)
    if generation is None or int(generation[1]) < 3:
        return FormatSupport(False, f"{device.name} is older than the M3: bf16 is emulated", emulated=True)
    return FormatSupport(True, f"{device.name} on macOS {_format_version(device.macos)} >= 14")


# In order of preference: the first one found is the reason that is given.
_CPU_BF16 = {
    "amx_bf16": "AMX multiplies tiles of bf16 (amx_bf16)",
    "avx512_bf16": "AVX-512 has dot products of bf16 (avx512_bf16)",
    "sve_bf16": "SVE multiplies bf16 matrices (sve_bf16)",
    "bf16": "Arm's bf16 matrix instructions (bf16)",
}
_CPU_LACKS = {
    "tf32": "CPUs have no tf32",
    "bf16": "bf16 is emulated; no amx_bf16, avx512_bf16, sve_bf16 or Arm bf16 instructions",
    "fp16": "no fast kernel for the convolution backward pass",
    "fp8": "CPUs only emulate fp8: useful for checking results, not for speed",
    "mxfp8": "CPUs only emulate mxfp8: useful for checking results, not for speed",
}


def _find_cpu_support(device: Device, format_name: str) -> FormatSupport:
    found = [words for flag, words in _CPU_BF16.items() if flag in device.isa]
    if format_name == "bf16" and found:
        return FormatSupport(True, found[0])
    return FormatSupport(False, _CPU_LACKS[format_name], emulated=format_name != "tf32")


def _find_other_support(device: Device, format_name: str) -> FormatSupport:
    if device.name == "hpu" and format_name == "bf16":
        return FormatSupport(True, "Gaudi's matrix engines compute in bf16")
    return FormatSupport(False, f"nothing is known about {device.name}'s {format_name}", emulated=format_name in _CAST)


_RULES: dict[str, Callable[[Device, str], FormatSupport]] = {
    "cuda": _find_cuda_support,
    "rocm": _find_rocm_support,
    "xpu": _find_xpu_support,
    "mps": _find_mps_support,
    "cpu": _find_cpu_support,
    "other": _find_other_support,
}


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


_WORTH_NAMING = {
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "avx512f": "AVX-512",
    "avx512_f": "AVX-512",
    "avx2": "AVX2",
    "sve_bf16": "SVE bf16",
    "bf16": "Arm bf16",
    "fp16": "fp16",
    "xmx": "XMX",
    "xmx_tf32": "XMX tf32",
}


def describe_device_facts(device: Device) -> dict[str, str]:
    """Return the facts that decide about this device, in words; empty ones are left out."""
    words = {
        "compute capability": _format_version(device.capability or ()),
        "architecture": device.arch,
        "instructions": ", ".join(dict.fromkeys(name for flag, name in _WORTH_NAMING.items() if flag in device.isa)),
        "macOS": _format_version(device.macos),
        "driver": device.driver,
        "torch": device.torch,
    }
    return {key: word for key, word in words.items() if word}


CPUINFO = Path(os.environ.get("HALFSTEP_CPUINFO", "/proc/cpuinfo"))
"""Another file describes another CPU: tests use it to run in bf16 on machines that only emulate it."""
AMD_DRIVER = Path("/sys/module/amdgpu/version")


def describe_device(device: torch.device | str | None = None) -> Device:
    """Return the device of this name, or the accelerator of this number; None means the best one, or else the CPU.

    Raises WrongUse for a device that is not present, and UnknownName for a name that torch does not know.
    """
    place = str(device if device is not None else torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if place.replace(",", "").isdecimal():
        place = _name_by_number(place)
    where = _TPU if place.split(":")[0] == "tpu" else _parse_device(place)
    reader = _READERS.get(where.type)
    if reader is None:
        return Device(kind="other", name=where.type, place=str(where), torch=torch.__version__)
    if where.type not in (_TPU.type, *list_device_types()):
        raise WrongUse(
            f"device {place!r} is not on this machine",
            allowed=", ".join(list_device_types()),
            do=(
                f"leave the device out, or name {list_device_types()[0]!r}; for a GPU, check its driver and torch's "
                "build"
            ),
        )
    return reader(where)


def _name_by_number(numbers: str) -> str:
    """Return the name of the accelerator of this number, as `--gpu_ids 0` gives it; raise WrongUse for several."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise WrongUse(
            f"device {numbers}, and this machine has no GPU that torch can use",
            allowed="cpu",
            do="leave the device out; for a GPU, check its driver and torch's build",
        )
    if "," in numbers:
        count = len(numbers.strip(",").split(","))
        raise WrongUse(
            f"the devices {numbers} for one process",
            allowed="one device for each process",
            do=f"CUDA_VISIBLE_DEVICES={numbers} torchrun --nproc_per_node {count} -m halfstep train RECIPE",
        )
    return f"{accelerator.type}:{numbers}"


def list_device_types() -> list[str]:
    """Return the device types that work here, the best one first."""
    # check_available: otherwise torch returns the accelerator that it was built for, present or not.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [accelerator.type, "cpu"] if accelerator else ["cpu"]


_TPU = torch.device("xla")


def _parse_device(place: str) -> torch.device:
    try:
        return torch.device(place)
    except RuntimeError:
        raise build_unknown_name_error("device", place, [*_READERS, "tpu"]) from None


def _describe_cuda(where: torch.device) -> Device:
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
        driver=f"HIP {torch.version.hip} {_read_text(AMD_DRIVER)}".strip() if amd else _format_cuda_driver(),
        torch=torch.__version__,
    )


def _format_cuda_driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"CUDA {version // 1000}.{version % 1000 // 10}, cuDNN {torch.backends.cudnn.version()}"


_XPU_ENGINES = {
    "fp16": "has_fp16",
    "fp64": "has_fp64",
    "xmx": "has_subgroup_matrix_multiply_accumulate",
    "xmx_tf32": "has_subgroup_matrix_multiply_accumulate_tensor_float32",
}


def _describe_xpu(where: torch.device) -> Device:
    facts = torch.xpu.get_device_properties(where)
    return Device(
        kind="xpu",
        name=facts.name,
        place=str(where),
        isa=frozenset(engine for engine, fact in _XPU_ENGINES.items() if getattr(facts, fact, False)),
        driver=facts.driver_version,
        torch=torch.__version__,
    )


def _describe_mps(where: torch.device) -> Device:
    version = platform.mac_ver()[0]
    return Device(
        kind="mps",
        name=_sysctl("machdep.cpu.brand_string") or "Apple GPU",
        place=str(where),
        macos=tuple(int(part) for part in version.split(".") if part.isdigit()),
        driver=f"macOS {version}",
        torch=torch.__version__,
    )


def _describe_cpu(where: torch.device) -> Device:
    name, isa = _READ_CPU.get(sys.platform, lambda: ("", frozenset()))()
    known = _torch_facts()
    return Device(
        kind="cpu",
        name=name or str(known.get("cpu_name") or platform.processor() or platform.machine()),
        place=str(where),
        isa=isa or frozenset(flag for flag, has in known.items() if has is True),
        torch=torch.__version__,
    )


def _read_linux_cpu() -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in _read_text(CPUINFO).splitlines():
        key, _, value = line.partition(":")
        # One block per core: the first one is enough.
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    # x86 lists `flags`, Arm `Features`. Linux writes Arm's SVE bf16 flag without an underscore.
    return fields.get("model name", ""), frozenset(flags.replace("svebf16", "sve_bf16").split())


_MACOS_FEATURES = {"bf16": "hw.optional.arm.FEAT_BF16", "fp16": "hw.optional.arm.FEAT_FP16"}


def _read_macos_cpu() -> tuple[str, frozenset[str]]:
    isa = frozenset(flag for flag, key in _MACOS_FEATURES.items() if _sysctl(key) == "1")
    return _sysctl("machdep.cpu.brand_string"), isa


_READ_CPU: dict[str, Callable[[], tuple[str, frozenset[str]]]] = {"linux": _read_linux_cpu, "darwin": _read_macos_cpu}


def _torch_facts() -> Mapping[str, Any]:
    """Return what torch knows about the CPU; `get_capabilities` is newer than the oldest torch supported."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        return dict(ask())
    older = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_tile": "_is_amx_tile_supported"}
    return {flag: bool(getattr(torch.cpu, name, bool)()) for flag, name in older.items()}


_READERS: dict[str, Callable[[torch.device], Device]] = {
    "cuda": _describe_cuda,
    "xpu": _describe_xpu,
    "mps": _describe_mps,
    "cpu": _describe_cpu,
    "xla": lambda where: Device(kind="tpu", name="TPU", place=str(where), torch=torch.__version__),
}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _sysctl(key: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
