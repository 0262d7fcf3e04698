"""The beginning of a safetensors file, and a tensor's bytes as they follow it: enough to write one as a stream.

The package safetensors writes a file in one piece from memory; reading is always left to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.errors import WrongUse

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """For tensors that follow in the order of the mapping, one right behind the other."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": _name_of(tensor, name), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def content(tensor: Tensor) -> memoryview:
    """The numbers of a tensor in main memory, in plain order, without a copy where they lie in it already."""
    flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def _name_of(tensor: Tensor, name: str) -> str:
    if tensor.dtype not in _NAMES:
        raise WrongUse(
            f"{name} is of type {tensor.dtype}, which files of tensors do not know",
            allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES),
            do="keep it as another type",
        )
    return _NAMES[tensor.dtype]
