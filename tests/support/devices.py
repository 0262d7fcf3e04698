"""Devices that are not here, by the facts that decide about them, and what each can do."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.precision.hardware import Device


@dataclass(frozen=True)
class Row:
    """A device, the formats it has beside fp32, what it falls back to for each precision, and what it emulates."""

    device: Device
    native: str
    auto: str
    tf32: str
    bf16: str
    fp16: str
    fp8: str
    emulated: str = ""
    source: str = ""

    def answer(self, asked: str) -> str:
        return asked if asked in ("fp32", *self.native.split()) else str(getattr(self, asked))


def cuda(name: str, major: int, minor: int) -> Device:
    return Device(kind="cuda", name=name, capability=(major, minor))


def rocm(name: str, arch: str) -> Device:
    return Device(kind="rocm", name=name, arch=arch)


def with_isa(kind: str, name: str, *isa: str) -> Device:
    return Device(kind=kind, name=name, isa=frozenset(isa))  # type: ignore[arg-type]


def apple(name: str, *macos: int) -> Device:
    return Device(kind="mps", name=name, macos=macos)


#                                          native                  auto    tf32    bf16    fp16    fp8  (emulated)
ROWS = [
    Row(cuda("Tesla V100", 7, 0), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(cuda("Tesla T4", 7, 5), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(cuda("RTX 2080 Ti", 7, 5), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(cuda("GTX 1080 Ti", 6, 1), "", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16 fp16"),
    Row(cuda("Tesla P100", 6, 0), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(cuda("Tesla M40", 5, 2), "", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16 fp16"),
    Row(cuda("NVIDIA GeForce GTX 1650", 7, 5), "", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16"),
    Row(cuda("A100", 8, 0), "tf32 bf16 fp16", "bf16", "tf32", "bf16", "fp16", "bf16"),
    Row(cuda("RTX 3090", 8, 6), "tf32 bf16 fp16", "bf16", "tf32", "bf16", "fp16", "bf16"),
    Row(cuda("RTX 4090", 8, 9), "tf32 bf16 fp16 fp8", "bf16", "tf32", "bf16", "fp16", "bf16"),
    Row(cuda("H100", 9, 0), "tf32 bf16 fp16 fp8", "bf16", "tf32", "bf16", "fp16", "bf16"),
    Row(cuda("B200", 10, 0), "tf32 bf16 fp16 fp8", "bf16", "tf32", "bf16", "fp16", "bf16"),
    Row(rocm("Instinct MI100", "gfx908"), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16"),
    Row(rocm("Instinct MI250X", "gfx90a"), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16"),
    Row(rocm("Instinct MI300X", "gfx942"), "tf32 bf16 fp16 fp8", "bf16", "tf32", "bf16", "fp16", "bf16"),
    Row(rocm("Radeon RX 6900 XT", "gfx1030"), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(rocm("Radeon RX 7900 XTX", "gfx1100"), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16"),
    Row(rocm("A Radeon of tomorrow", "gfx2000"), "", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16 fp16"),
    Row(with_isa("xpu", "Arc A770", "fp16", "xmx"), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16"),
    Row(with_isa("xpu", "Iris Xe (Xe-LP)", "fp16"), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(
        with_isa("xpu", "Data Center GPU Max 1550", "fp16", "xmx", "xmx_tf32"),
        "tf32 bf16 fp16",
        "bf16",
        "tf32",
        "bf16",
        "fp16",
        "bf16",
    ),
    Row(apple("Apple M1", 14, 2), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(apple("Apple M2 Pro", 14, 2), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16"),
    Row(apple("Apple M2", 13, 6), "fp16", "fp16", "fp32", "fp16", "fp16", "fp16"),
    Row(apple("Apple M12", 20), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16"),
    Row(
        with_isa("cpu", "Xeon with AMX", "amx_bf16", "avx512_bf16"),
        "bf16",
        "bf16",
        "fp32",
        "bf16",
        "fp16",
        "bf16",
        "fp16",
    ),
    Row(with_isa("cpu", "Zen 4", "avx512_bf16", "avx512f"), "bf16", "bf16", "fp32", "bf16", "fp16", "bf16", "fp16"),
    Row(with_isa("cpu", "Graviton 3", "bf16", "sve"), "bf16", "bf16", "fp32", "bf16", "fp16", "bf16", "fp16"),
    Row(with_isa("cpu", "Core i7", "avx2", "f16c"), "", "fp32", "fp32", "fp32", "fp16", "fp32", "bf16 fp16"),
    Row(Device(kind="other", name="hpu"), "bf16", "bf16", "fp32", "bf16", "fp32", "bf16", "fp16"),
]

_CUDA = "CUDA C++ programming guide, compute capabilities and arithmetic throughput"
_TURING = "pytorch/pytorch#58123: TU116 and TU117 have no tensor cores"
_MATRIX = "AMD matrix instruction calculator, by architecture"
_METAL = "Metal feature set tables: bfloat from family Apple9 (M3) on"
_ALL = ("tf32 bf16 fp16 fp8", "bf16", "tf32", "bf16", "fp16", "bf16", "")
_NO_FP16 = ("", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16")
_ONLY_FP16 = ("fp16", "fp16", "fp32", "fp16", "fp16", "fp16", "bf16")
_WITHOUT_TF32 = ("bf16 fp16 fp8", "bf16", "fp32", "bf16", "fp16", "bf16", "")
_NOTHING = ("", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16 fp16")
_BF16_CPU = ("bf16", "bf16", "fp32", "bf16", "fp16", "bf16", "fp16")
_OLD_CPU = ("", "fp32", "fp32", "fp32", "fp16", "fp32", "bf16 fp16")
# Devices that people have and that were judged wrongly once, or might be.
ROWS += [
    Row(rocm("Instinct MI355X", "gfx950"), *_WITHOUT_TF32, "CDNA 4 ISA: without xf32"),
    Row(rocm("Instinct MI450", "gfx1250"), *_WITHOUT_TF32, "LLVM AMDGPU target gfx1250"),
    Row(rocm("Radeon 8060S", "gfx1151"), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16", "", _MATRIX),
    Row(rocm("RX 9070 XT", "gfx1201"), *_WITHOUT_TF32, _MATRIX),
    Row(rocm("RX 5700", "gfx1010"), *_NOTHING, _MATRIX),
    Row(rocm("RX 580", "gfx803"), *_NOTHING, _MATRIX),
    Row(rocm("Vega 8", "gfx90c"), *_NOTHING, _MATRIX),
    Row(cuda("NVIDIA GeForce GTX 1660 SUPER", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("NVIDIA GeForce GTX 1630", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("NVIDIA T1000 8GB", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("Quadro T2000", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("NVIDIA T550 Laptop GPU", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("NVIDIA CMP 30HX", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("NVIDIA GeForce MX450", 7, 5), *_NO_FP16, _TURING),
    Row(cuda("NVIDIA Tegra X1", 5, 3), *_ONLY_FP16, _CUDA),
    Row(cuda("NVIDIA Tegra X2", 6, 2), *_ONLY_FP16, _CUDA),
    Row(cuda("Xavier", 7, 2), *_ONLY_FP16, _CUDA),
    Row(cuda("Orin", 8, 7), "tf32 bf16 fp16", "bf16", "tf32", "bf16", "fp16", "bf16", "", _CUDA),
    Row(cuda("NVIDIA Thor", 11, 0), *_ALL, _CUDA),
    Row(cuda("NVIDIA B300", 10, 3), *_ALL, _CUDA),
    Row(cuda("NVIDIA GB10", 12, 1), *_ALL, _CUDA),
    Row(cuda("NVIDIA GeForce GTX 1080", 6, 1), *_NOTHING, _CUDA),
    Row(cuda("Tesla K80", 3, 7), *_NOTHING, _CUDA),
    Row(apple("Apple M2 Max", 15, 0), *_ONLY_FP16, _METAL),
    Row(apple("Apple M3", 15, 0), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16", "", _METAL),
    Row(apple("Apple M5", 26, 0), "bf16 fp16", "bf16", "fp32", "bf16", "fp16", "bf16", "", _METAL),
    Row(apple("Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz", 14, 0), *_ONLY_FP16, _METAL),
    Row(Device(kind="other", name="npu"), *_NOTHING, "nothing is known"),
    Row(with_isa("cpu", "Xeon 6", "amx_bf16", "amx_fp16", "avx512_fp16"), *_BF16_CPU, "Intel ISA extensions reference"),
    Row(with_isa("cpu", "Core Ultra 9", "avx2", "avx_ne_convert"), *_OLD_CPU, "AVX-NE-CONVERT only converts"),
    Row(with_isa("cpu", "Neoverse-V1", "bf16", "sve_bf16"), *_BF16_CPU, "Arm Architecture Reference Manual, FEAT_BF16"),
]
ASKED = ("auto", "fp32", "tf32", "bf16", "fp16", "fp8")
TPU = Device(kind="tpu", name="TPU v4")


def named(name: str) -> Device:
    return next(row.device for row in ROWS if row.device.name == name)
