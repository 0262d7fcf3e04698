"""Convert nested state to plain JSON with named tensors, and back, without loss and without pickle.

Supported are dicts, lists, tuples, numbers, strings, None and tensors. Anything else is refused when it is saved, so
that nothing can be missing when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep import distributed
from halfstep.errors import BadData, WrongUse

Plain: TypeAlias = Any
"""A value that JSON can represent."""
TENSOR, TUPLE, PAIRS, NUMBER, STRIDES = "tensor", "tuple", "pairs", "number", "strides"
"""The marks for values that JSON cannot represent; a tensor is written as `{"$tensor": name}`."""
_MARKS = {f"${mark}" for mark in (TENSOR, TUPLE, PAIRS, NUMBER)}
DEEPEST = 32
"""The maximum nesting of containers: far above any real state, and far below Python's recursion limit."""


def pack_state(tree: Any, name: str) -> tuple[Plain, dict[str, Tensor]]:
    """Return `tree` as plain JSON, and its tensors by the names used in the JSON; names start with `name`.

    Raises WrongUse for a value that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    return _pack_value(tree, name, tensors, 0), tensors


def _pack_value(value: Any, name: str, tensors: dict[str, Tensor], depth: int) -> Plain:
    if depth > DEEPEST:
        raise _build_unpackable_error(f"{name[:200]} is nested more than {DEEPEST} levels deep")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # JSON has no inf or NaN; Python would write words that strict readers refuse.
        return value if math.isfinite(value) else {"$number": str(value)}
    if isinstance(value, Tensor):
        return _pack_tensor(value, name, tensors)
    if isinstance(value, Mapping):
        return _pack_mapping(value, name, tensors, depth + 1)
    # The exact types: a named tuple or a list subclass would come back as a plain one, which is a silent change.
    if type(value) in (list, tuple):
        items = [_pack_value(item, f"{name}/{number}", tensors, depth + 1) for number, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    raise _build_unpackable_error(f"{name} contains a {type(value).__name__}")


def _build_unpackable_error(given: str) -> WrongUse:
    return WrongUse(
        f"{given}, which a checkpoint cannot store",
        allowed="tensors, numbers, strings, None, and dicts, lists and tuples of these",
        do="let its state_dict() give plain data",
    )


def _pack_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> Plain:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _build_unpackable_error(f"{name} is a tensor without plain numbers ({tensor.layout}, {tensor.device})")
    while name in tensors:
        # Two paths can have the same name: a key with a slash in it, or the int 1 and the string "1".
        name += "'"
    tensors[name] = tensor.detach()
    # safetensors stores contiguous data only, but an optimizer's kernels expect its state in the layout of its
    # parameter (channels_last, for example). So unusual strides are saved and restored.
    strides = list(tensor.stride())
    usual = strides == list(torch.empty(tensor.shape, device="meta").stride()) or not _is_dense(tensor.shape, strides)
    return {"$tensor": name} if usual else {"$tensor": name, f"${STRIDES}": strides}


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the strides place the elements without gaps or overlap, so that no extra memory is needed."""
    room = 1
    for stride, side in sorted((stride, side) for side, stride in zip(shape, strides, strict=True) if side != 1):
        if stride != room:
            return 0 in shape
        room *= side
    return True


def _pack_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor], depth: int) -> Plain:
    packed = [
        (_check_key(key, name), _pack_value(inner, f"{name}/{key}", tensors, depth)) for key, inner in value.items()
    ]
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    # JSON keys are strings: an int key, as in an optimizer's state, would come back as a string. A key with `$` would
    # be taken for a mark.
    return dict(packed) if plain else {"$pairs": [list(pair) for pair in packed]}


def _check_key(key: Any, name: str) -> int | str:
    if isinstance(key, (int, str)) and not isinstance(key, bool):
        return key
    raise WrongUse(f"{name} has the key {key!r}", allowed="strings and integers as keys", do="use plain keys")


def unpack_state(plain: Plain, tensors: Mapping[str, Tensor], where: str) -> Any:
    """Return the tree that `pack_state` was given; `where` names the source in errors.

    Raises BadData if the JSON is not what `pack_state` writes, or if it names a tensor that does not exist.
    """
    try:
        return _unpack_value(plain, tensors, 0)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError) as error:
        # The JSON may be edited or damaged; these are the errors that arbitrary JSON can cause below.
        if isinstance(error, BadData):
            raise
        raise BadData(
            f"{where} is not the state of a run: {type(error).__name__} {error}",
            allowed="what halfstep wrote",
            do="use another checkpoint",
        ) from error


def _unpack_value(plain: Plain, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels")
    if isinstance(plain, list):
        return [_unpack_value(item, tensors, depth + 1) for item in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if mark not in _MARKS:
        return {key: _unpack_value(inner, tensors, depth + 1) for key, inner in plain.items()}
    return _unpack_marked(mark[1:], plain, tensors, depth + 1)


def _unpack_marked(mark: str, plain: dict[str, Any], tensors: Mapping[str, Tensor], depth: int) -> Any:
    content = plain[f"${mark}"]
    if mark == TENSOR:
        return _restore_strides(tensors[content], plain.get(f"${STRIDES}"))
    if mark == NUMBER:
        return float(content)
    if mark == TUPLE:
        return tuple(_unpack_value(item, tensors, depth) for item in content)
    return {_check_key(key, "a dict"): _unpack_value(inner, tensors, depth) for key, inner in content}


def _restore_strides(tensor: Tensor, strides: list[int] | None) -> Tensor:
    """Return a copy of a tensor, with the strides it was saved with."""
    # Always a copy: a loaded tensor may be memory-mapped from a checkpoint file that retention later removes.
    # A shard is laid out as its parameter, not as the whole tensor was.
    if strides is None or distributed.is_dtensor_shard(tensor):
        return tensor.clone()
    # Strides come from a file: overlapping ones, or ones with gaps, could claim any amount of memory.
    if not _is_dense(tensor.shape, strides):
        raise ValueError(f"strides {strides} for a tensor of shape {tuple(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
