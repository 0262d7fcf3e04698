"""Number formats and their facts. Every figure is asked of torch, none is typed in."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A number format: its range, its spacing, and how far it counts exactly."""

    name: str
    dtype: torch.dtype | None
    """The torch dtype that stores it; None for tf32, which only exists inside a multiplication."""
    largest: float
    smallest_normal: float
    epsilon: float

    @property
    def largest_exact_integer(self) -> int:
        """The last n such that every integer up to n is representable."""
        return int(2 / self.epsilon)

    @property
    def bytes(self) -> int:
        return 4 if self.dtype is None else self.dtype.itemsize


def _stored(name: str, dtype: torch.dtype) -> Format:
    facts = torch.finfo(dtype)
    return Format(name, dtype, facts.max, facts.smallest_normal, facts.eps)


FP32 = _stored("fp32", torch.float32)
FP64 = _stored("fp64", torch.float64)
BF16 = _stored("bf16", torch.bfloat16)
FP16 = _stored("fp16", torch.float16)
FP8_E4M3 = _stored("fp8_e4m3", torch.float8_e4m3fn)
FP8_E5M2 = _stored("fp8_e5m2", torch.float8_e5m2)
# tf32 has fp32's exponent and fp16's fraction, and no dtype that finfo could be asked about.
TF32 = Format(
    "tf32",
    None,
    largest=FP32.largest / (2 - FP32.epsilon) * (2 - FP16.epsilon),
    smallest_normal=FP32.smallest_normal,
    epsilon=FP16.epsilon,
)

FORMATS = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values() if f.dtype is not None}


def widest(device: torch.device) -> torch.dtype:
    """The widest format that a device computes in; Apple's GPUs have nothing wider than fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


def as_fp32(number: float) -> float:
    """A Python number rounded as a float32 tensor would round it, without making one."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def format_of(dtype: torch.dtype) -> Format | None:
    """The format a dtype stores, or None for integers and other dtypes we have no word for."""
    return _BY_DTYPE.get(dtype)


def name_of(dtype: torch.dtype) -> str:
    """The name of the format a dtype stores, or torch's own word for it."""
    found = format_of(dtype)
    return found.name if found else str(dtype).removeprefix("torch.")


def is_narrow(dtype: torch.dtype) -> bool:
    """Floating point in fewer than 32 bits."""
    return dtype.is_floating_point and dtype.itemsize < 4
