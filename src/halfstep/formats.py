"""Number formats and their properties; every figure is read from torch, none is typed in."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A number format: its range, its spacing, and the integers that it represents exactly."""

    name: str
    dtype: torch.dtype | None
    """The torch dtype that stores it; None for tf32, which only exists inside a multiplication."""
    largest: float
    smallest_normal: float
    epsilon: float

    @property
    def largest_exact_integer(self) -> int:
        """The largest n such that every integer up to n is representable."""
        return int(2 / self.epsilon)

    @property
    def bytes(self) -> int:
        """The bytes of one stored number; tf32 is stored as fp32."""
        return 4 if self.dtype is None else self.dtype.itemsize

    @property
    def fraction_bits(self) -> int:
        """The bits of the fraction, without the implicit one."""
        return -math.frexp(self.epsilon)[1] + 1

    @property
    def exponent_bits(self) -> int:
        """The exponent bits, from the bias 2^(bits - 1) - 1: the smallest normal number is 2^(1 - bias)."""
        return (2 - math.frexp(self.smallest_normal)[1]).bit_length() + 1

    @property
    def bits(self) -> int:
        """The bits of the number itself, with its sign; tf32 is stored in more."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def smallest(self) -> float:
        """The smallest subnormal number; half of it and less rounds to zero."""
        return self.smallest_normal * self.epsilon

    @property
    def decimal_digits(self) -> int:
        """The decimal digits that are always preserved."""
        return int((self.fraction_bits + 1) * math.log10(2))


def _build_format(name: str, dtype: torch.dtype) -> Format:
    facts = torch.finfo(dtype)
    return Format(name, dtype, facts.max, facts.smallest_normal, facts.eps)


FP32 = _build_format("fp32", torch.float32)
FP64 = _build_format("fp64", torch.float64)
BF16 = _build_format("bf16", torch.bfloat16)
FP16 = _build_format("fp16", torch.float16)
FP8_E4M3 = _build_format("fp8_e4m3", torch.float8_e4m3fn)
FP8_E5M2 = _build_format("fp8_e5m2", torch.float8_e5m2)
# tf32 has fp32's exponent and fp16's fraction. No dtype stores it, so torch.finfo cannot be asked.
TF32 = Format(
    "tf32",
    None,
    largest=FP32.largest / (2 - FP32.epsilon) * (2 - FP16.epsilon),
    smallest_normal=FP32.smallest_normal,
    epsilon=FP16.epsilon,
)

FORMATS = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values() if f.dtype is not None}


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the widest dtype that a device computes in; Apple's GPUs have nothing wider than fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


def round_to_fp32(number: float) -> float:
    """Return a Python number rounded to float32, without allocating a tensor."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def find_format(dtype: torch.dtype) -> Format | None:
    """Return the format that a dtype stores, or None for integers and other dtypes without a format here."""
    return _BY_DTYPE.get(dtype)


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of the format that a dtype stores, or torch's own name for the dtype."""
    found = find_format(dtype)
    return found.name if found else str(dtype).removeprefix("torch.")


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a dtype is floating point with fewer than 32 bits."""
    return dtype.is_floating_point and dtype.itemsize < 4


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in at least fp32, for sums, norms and losses.

    Args:
        tensor: A tensor in any floating-point format.

    Returns:
        The tensor in fp32, or `tensor` itself if it is fp32 or wider.
    """
    return tensor.float() if is_narrow(tensor.dtype) else tensor
