"""Write the header of a safetensors file and the bytes of its tensors, so that a file can be streamed.

The package safetensors writes a file in one piece from memory; files are always read with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.errors import WrongUse

DTYPES = {
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
"""The names of dtypes in safetensors files."""
_ALIGNED = 8


def encode_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header for tensors that follow contiguously, in this order; raise WrongUse for an unknown dtype."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": _name_stored_dtype(tensor, name),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    # The format lets readers map tensors directly, so their data has to start at a multiple of 8 bytes.
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor in row-major order, without a copy where it is contiguous already."""
    flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def _name_stored_dtype(tensor: Tensor, name: str) -> str:
    if tensor.dtype not in DTYPES:
        raise WrongUse(
            f"{name} is of type {tensor.dtype}, which .safetensors files do not support",
            allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES),
            do="store it as another type",
        )
    return DTYPES[tensor.dtype]
