"""State to JSON and tensors, and back: nothing is lost, and what cannot be kept is refused when it is saved."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from halfstep.checkpoint.packing import DEEPEST, pack_state, unpack_state
from halfstep.errors import BadData, WrongUse
from halfstep.safetensors_header import content, encode_header


def through(tree: Any, folder: Path) -> Any:
    """What comes back from the disk."""
    plain, tensors = pack_state(tree, "tree")
    file = folder / "tensors"
    file.write_bytes(encode_header(tensors, {}) + b"".join(bytes(content(tensor)) for tensor in tensors.values()))
    return unpack_state(json.loads(json.dumps(plain, allow_nan=False)), load_file(file), "here")


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        [],
        (),
        {"empty": {}, "list": [], "tuple": ()},
        {0: "a", 7: {"b": 1}},
        {0: "number", "0": "text"},
        (1, (2.5, ["x", None]), True),
        {"$tensor": "not one", "$pairs": [1]},
        {"big": 2**80, "small": 5e-324, "text": "ü\u2028\ud800"},
    ],
    ids=str,
)
def test_plain_data_comes_back_as_it_was(tree: Any, tmp_path: Path) -> None:
    back = through(tree, tmp_path)
    assert back == tree
    assert repr(back) == repr(tree)


def test_numbers_that_json_has_no_sign_for_come_back(tmp_path: Path) -> None:
    back = through({"a": [math.inf, -math.inf], "b": math.nan, "c": -0.0}, tmp_path)
    assert back["a"] == [math.inf, -math.inf]
    assert math.isnan(back["b"])
    assert math.copysign(1, back["c"]) == -1


def test_mappings_of_other_kinds_become_dicts(tmp_path: Path) -> None:
    assert type(through(OrderedDict(a=1), tmp_path)) is dict


TENSORS = {
    "one number": torch.tensor(3.5),
    "none": torch.empty(0),
    "no rows": torch.empty(0, 3),
    "no columns, turned": torch.empty(0, 3).t(),
    "in 16 bits": torch.randn(3).bfloat16(),
    "turned": torch.randn(3, 4).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "1x1 kernel, channels last": torch.empty(4, 3, 1, 1, memory_format=torch.channels_last).normal_(),
    "one channel, channels last": torch.empty(4, 1, 3, 3, memory_format=torch.channels_last).normal_(),
    "not finite": torch.tensor([math.nan, math.inf, -0.0]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "truth": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_with_every_bit_and_their_layout(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name]
    back = through({"x": [tensor]}, tmp_path)["x"][0]
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert _bits(back) == _bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1.0, 2.0]).expand(3, 2), torch.randn(4)[::3].unsqueeze(1).expand(2, 2), torch.randn(6)[::2]],
    ids=["expanded", "expanded, as large as a dense one", "with gaps"],
)
def test_a_tensor_with_gaps_or_overlaps_comes_back_dense(tensor: Tensor, tmp_path: Path) -> None:
    back = through(tensor, tmp_path)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


def test_what_comes_back_is_not_the_file(tmp_path: Path) -> None:
    """A checkpoint is removed while the run that came from it goes on."""
    tensors = {"t": torch.zeros(3)}
    back = unpack_state({"$tensor": "t"}, tensors, "here")
    tensors["t"] += 1
    assert back.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "tree",
    [
        {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "a/b'": torch.tensor(3)},
        {1: torch.tensor(1), "1": torch.tensor(2)},
    ],
    ids=["slash", "slashes", "number and text"],
)
def test_names_that_look_alike_keep_their_own_tensors(tree: Any, tmp_path: Path) -> None:
    assert str(through(tree, tmp_path)) == str(tree)


def test_tensors_are_known_by_their_place() -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    plain, tensors = pack_state({"state": {0: [tensor]}}, "optimizers")
    assert plain == {"state": {"$pairs": [[0, [{"$tensor": "optimizers/state/0/0"}]]]}}
    assert tensors["optimizers/state/0/0"].data_ptr() == tensor.data_ptr()
    assert not tensors["optimizers/state/0/0"].requires_grad


def _cycle() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


@pytest.mark.wording
@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        b"bytes",
        torch.Size([2]),
        1j,
        lambda: 0,
        torch.zeros(2, 2).to_sparse(),
        torch.empty(2, device="meta"),
        _cycle(),
        {True: 1},
        {None: 1},
        {1.5: 1},
        {(1, 2): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_when_it_is_saved(value: Any) -> None:
    with pytest.raises(WrongUse, match="metric/deep") as caught:
        pack_state({"deep": value}, "metric")
    assert caught.value.do


@pytest.mark.wording
def test_what_can_be_saved_can_be_loaded_however_deep_it_is(tmp_path: Path) -> None:
    tree: Any = torch.ones(1)
    for level in range(DEEPEST):
        tree = {level: tree} if level % 2 else (tree,)
    assert str(through(tree, tmp_path)) == str(tree)
    with pytest.raises(WrongUse, match="levels"):
        pack_state([tree], "tree")


def _nested(levels: int) -> Any:
    plain: Any = 1
    for _ in range(levels):
        plain = [plain]
    return plain


@pytest.mark.wording
@pytest.mark.parametrize(
    "plain",
    [
        {"$tensor": "absent"},
        {"$tensor": ["t"]},
        {"$tensor": "t", "$strides": [0]},
        {"$tensor": "t", "$strides": [-1]},
        {"$tensor": "t", "$strides": [1, 1]},
        {"$tensor": "t", "$strides": [2**70]},
        {"$tensor": "t", "$strides": ["1"]},
        {"$tuple": 5},
        {"$number": "many"},
        {"$pairs": [[1]]},
        {"$pairs": [[[1], 2]]},
        _nested(DEEPEST + 2),
    ],
    ids=str,
)
def test_json_that_pack_does_not_write_is_refused(plain: Any) -> None:
    with pytest.raises(BadData, match="in this place"):
        unpack_state(plain, {"t": torch.ones(3)}, "in this place")


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
