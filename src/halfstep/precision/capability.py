"""Decide which formats a device computes in natively, by rules over plain facts.

The facts are data, so devices that are not present can be judged too. torch's `is_bf16_supported()` is not used
anywhere: it is True on a T4, which only emulates bf16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "rocm", "cpu", "mps", "xpu", "tpu", "other"]

FORMAT_NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, described by the facts that decide what it supports."""

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
class Ability:
    """Whether a device computes in a format natively, and the fact that decides it."""

    native: bool
    reason: str


def ability(device: Device, format_name: str) -> Ability:
    """Return whether `device` computes in this format natively, and why."""
    if device.kind == "tpu":
        return Ability(False, "TPUs run through torch_xla, which is not supported here")
    if format_name == "fp32":
        return Ability(True, "every device has it")
    return _RULES[device.kind](device, format_name)


_CUDA_SINCE = {
    "tf32": ((8, 0), "there are no tf32 tensor cores", "tf32 tensor cores"),
    "bf16": ((8, 0), "bf16 is emulated", "bf16 tensor cores"),
    "fp8": ((8, 9), "there are no fp8 tensor cores", "fp8 tensor cores"),
}
_DOUBLE_RATE_FP16 = ((6, 0), (6, 2))
# The small Turing chips have the compute capability of the large ones, so only their names tell them apart. T4, T10 and
# T40 are large ones.
_TURING_WITHOUT_TENSOR_CORES = re.compile(r"\b(GTX 16\d\d|MX450|MX550|T(400|500|550|600|1000|1200|2000))\b")


def _cuda(device: Device, format_name: str) -> Ability:
    has = device.capability or (0, 0)
    if format_name == "fp16":
        return _cuda_fp16(has, device.name)
    since, lack, gain = _CUDA_SINCE[format_name]
    if has >= since:
        return Ability(True, f"compute capability {_dotted(has)} >= {_dotted(since)}: {gain}")
    return Ability(False, f"compute capability {_dotted(has)} < {_dotted(since)}: {lack}")


def _cuda_fp16(has: tuple[int, int], name: str) -> Ability:
    if has == (7, 5) and _TURING_WITHOUT_TENSOR_CORES.search(name):
        return Ability(True, f"{name}: fp16 at double rate, without tensor cores")
    if has >= (7, 0):
        return Ability(True, f"compute capability {_dotted(has)} >= 7.0: fp16 tensor cores")
    if has in _DOUBLE_RATE_FP16:
        return Ability(True, f"compute capability {_dotted(has)}: fp16 at double rate, without tensor cores")
    # The consumer Pascal chips, between two that have fp16 at double rate: `>= 6.0` would be wrong.
    if has == (6, 1):
        return Ability(False, "compute capability 6.1: fp16 runs at 1/64 of fp32's rate")
    return Ability(False, f"compute capability {_dotted(has)} < 6.0: fp16 is emulated")


# By the beginning of the architecture's name; the longest match counts.
_ROCM: dict[str, tuple[frozenset[str], str]] = {
    "gfx900": (frozenset({"fp16"}), "Vega: fp16 at double rate, no bf16"),
    "gfx906": (frozenset({"fp16"}), "Vega: fp16 at double rate, no bf16"),
    "gfx908": (frozenset({"bf16", "fp16"}), "CDNA matrix cores"),
    "gfx90a": (frozenset({"bf16", "fp16"}), "CDNA 2 matrix cores"),
    "gfx94": (frozenset({"bf16", "fp16", "fp8"}), "CDNA 3 matrix cores"),
    "gfx95": (frozenset({"bf16", "fp16", "fp8"}), "CDNA 4 matrix cores"),
    "gfx103": (frozenset({"fp16"}), "RDNA 2: fp16 at double rate, no bf16"),
    "gfx11": (frozenset({"bf16", "fp16"}), "RDNA 3 WMMA"),
    "gfx12": (frozenset({"bf16", "fp16", "fp8"}), "RDNA 4 WMMA"),
}


def _rocm(device: Device, format_name: str) -> Ability:
    if format_name == "tf32":
        return Ability(False, "tf32 is a format of NVIDIA's and Intel's matrix engines")
    known = [prefix for prefix in _ROCM if device.arch.startswith(prefix)]
    if not known:
        return Ability(False, f"nothing is known about {device.arch or 'this architecture'}")
    formats, what = _ROCM[max(known, key=len)]
    if format_name in formats:
        return Ability(True, f"{device.arch} ({what})")
    return Ability(False, f"{device.arch} ({what}): {format_name} is emulated")


_XPU_NEEDS = {
    "tf32": ("xmx_tf32", "XMX engines that take tf32"),
    "bf16": ("xmx", "XMX engines"),
    "fp16": ("fp16", "fp16 arithmetic"),
    "fp8": ("xmx_fp8", "fp8 engines"),
}


def _xpu(device: Device, format_name: str) -> Ability:
    need, words = _XPU_NEEDS[format_name]
    if need in device.isa:
        return Ability(True, f"it has {words}")
    return Ability(False, f"it has no {words}: {format_name} is emulated")


_MACOS_WITH_BF16 = (14,)


def _mps(device: Device, format_name: str) -> Ability:
    if format_name == "fp16":
        return Ability(True, "every Apple GPU computes in fp16")
    if format_name != "bf16":
        return Ability(False, f"Apple GPUs have no {format_name}")
    generation = re.search(r"\bM(\d+)", device.name)
    if generation is None or int(generation[1]) < 2:
        return Ability(False, f"{device.name} is older than the M2: bf16 is emulated")
    if device.macos < _MACOS_WITH_BF16:
        return Ability(False, f"macOS {_dotted(device.macos) or 'of unknown version'} < 14: Metal has no bf16")
    return Ability(True, f"{device.name} on macOS {_dotted(device.macos)} >= 14")


# In order of preference: the first one found is the reason that is given.
_CPU_BF16 = {
    "amx_bf16": "AMX multiplies tiles of bf16 (amx_bf16)",
    "avx512_bf16": "AVX-512 has dot products of bf16 (avx512_bf16)",
    "sve_bf16": "SVE multiplies bf16 matrices (sve_bf16)",
    "bf16": "Arm's bf16 matrix instructions (bf16)",
}
_CPU_LACKS = {
    "tf32": "CPUs have no tf32",
    "bf16": f"none of {', '.join(_CPU_BF16)}: bf16 is emulated",
    "fp16": "no fast kernel for a convolution's backward: it runs, slowly, if asked for by name",
    "fp8": "CPUs have no fp8",
}


def _cpu(device: Device, format_name: str) -> Ability:
    found = [words for flag, words in _CPU_BF16.items() if flag in device.isa]
    if format_name == "bf16" and found:
        return Ability(True, found[0])
    return Ability(False, _CPU_LACKS[format_name])


def _other(device: Device, format_name: str) -> Ability:
    return Ability(False, f"nothing is known about {device.name}'s {format_name}")


_RULES: dict[str, Callable[[Device, str], Ability]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "xpu": _xpu,
    "mps": _mps,
    "cpu": _cpu,
    "other": _other,
}


def _dotted(version: tuple[int, ...]) -> str:
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


def facts(device: Device) -> dict[str, str]:
    """Return the facts that decide about this device, in words; empty ones are left out."""
    words = {
        "compute capability": _dotted(device.capability or ()),
        "architecture": device.arch,
        "instructions": ", ".join(dict.fromkeys(name for flag, name in _WORTH_NAMING.items() if flag in device.isa)),
        "macOS": _dotted(device.macos),
        "driver": device.driver,
        "torch": device.torch,
    }
    return {key: word for key, word in words.items() if word}
