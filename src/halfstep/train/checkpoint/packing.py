"""Nested state to plain JSON and tensors by name, and back, with nothing lost and nothing that could run code.

Dicts, lists, tuples, numbers, texts, None and tensors are all that there is; anything else is refused when it is saved,
so that it cannot be missed when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.errors import BadData, WrongUse

Plain: TypeAlias = Any
"""What JSON can hold."""
TENSOR, TUPLE, PAIRS, NUMBER, STRIDES = "tensor", "tuple", "pairs", "number", "strides"
"""What JSON has no form for is written as `{"$tensor": ...}` and the like."""
_MARKS = {f"${mark}" for mark in (TENSOR, TUPLE, PAIRS, NUMBER)}
DEEPEST = 32
"""Containers within containers: far more than any state has, and far less than Python can follow."""


def pack(tree: Any, name: str) -> tuple[Plain, dict[str, Tensor]]:
    """`tree` as plain JSON, and its tensors by the names that the JSON knows them by."""
    tensors: dict[str, Tensor] = {}
    return _packed(tree, name, tensors, 0), tensors


def _packed(value: Any, name: str, tensors: dict[str, Tensor], depth: int) -> Plain:
    if depth > DEEPEST:
        raise _not_kept(f"{name[:200]} lies more than {DEEPEST} levels deep")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$number": str(value)}
    if isinstance(value, Tensor):
        return _reference(value, name, tensors)
    if isinstance(value, Mapping):
        return _mapping(value, name, tensors, depth + 1)
    if type(value) in (list, tuple):
        items = [_packed(item, f"{name}/{number}", tensors, depth + 1) for number, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    raise _not_kept(f"{name} holds a {type(value).__name__}")


def _not_kept(given: str) -> WrongUse:
    return WrongUse(
        f"{given}, which a checkpoint cannot keep",
        allowed="tensors, numbers, texts, None, and dicts, lists and tuples of these",
        do="let its state_dict() give plain data",
    )


def _reference(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> Plain:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _not_kept(f"{name} is a tensor without plain numbers ({tensor.layout}, {tensor.device})")
    while name in tensors:
        name += "'"  # a name with a slash in it, or 1 beside "1"
    tensors[name] = tensor.detach()
    # Files know numbers in plain order only; an optimizer's kernels expect its state laid out as its parameter is.
    strides = list(tensor.stride())
    usual = strides == list(torch.empty(tensor.shape, device="meta").stride()) or not _dense(tensor.shape, strides)
    return {"$tensor": name} if usual else {"$tensor": name, f"${STRIDES}": strides}


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides lay the elements side by side, so that a tensor with them takes no more room than another."""
    room = 1
    for stride, side in sorted((stride, side) for side, stride in zip(shape, strides, strict=True) if side != 1):
        if stride != room:
            return 0 in shape
        room *= side
    return True


def _mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor], depth: int) -> Plain:
    packed = [(_key(key, name), _packed(inner, f"{name}/{key}", tensors, depth)) for key, inner in value.items()]
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    return dict(packed) if plain else {"$pairs": [list(pair) for pair in packed]}


def _key(key: Any, name: str) -> int | str:
    if isinstance(key, (int, str)) and not isinstance(key, bool):
        return key
    raise WrongUse(f"{name} has the key {key!r}", allowed="texts and whole numbers as keys", do="use plain keys")


def unpack(plain: Plain, tensors: Mapping[str, Tensor], where: str) -> Any:
    """The tree again. BadData where the JSON is not what `pack` writes, or names a tensor that is not there."""
    try:
        return _unpacked(plain, tensors, 0)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError) as error:
        if isinstance(error, BadData):
            raise
        raise BadData(
            f"{where} is not the state of a run: {type(error).__name__} {error}",
            allowed="what halfstep wrote",
            do="use another checkpoint",
        ) from error


def _unpacked(plain: Plain, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels")
    if isinstance(plain, list):
        return [_unpacked(item, tensors, depth + 1) for item in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if mark not in _MARKS:
        return {key: _unpacked(inner, tensors, depth + 1) for key, inner in plain.items()}
    return _marked(mark[1:], plain, tensors, depth + 1)


def _marked(mark: str, plain: dict[str, Any], tensors: Mapping[str, Tensor], depth: int) -> Any:
    content = plain[f"${mark}"]
    if mark == TENSOR:
        return _laid_out(tensors[content], plain.get(f"${STRIDES}"))
    if mark == NUMBER:
        return float(content)
    if mark == TUPLE:
        return tuple(_unpacked(item, tensors, depth) for item in content)
    return {_key(key, "a dict"): _unpacked(inner, tensors, depth) for key, inner in content}


def _laid_out(tensor: Tensor, strides: list[int] | None) -> Tensor:
    """A copy: what was read may be a part of a file in memory, and the file is removed while the run goes on."""
    if strides is None:
        return tensor.clone()
    if not _dense(tensor.shape, strides):
        raise ValueError(f"strides {strides} for a tensor of shape {tuple(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
