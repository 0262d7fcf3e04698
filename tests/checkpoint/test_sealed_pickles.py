"""What would run code is known by its bytes; what is merely damaged is not taken for it."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import tarfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from safetensors.torch import save

from halfstep.checkpoint.sealed import LOOKED_AT, describe_unsafe_file
from halfstep.safetensors_header import encode_header


class Call:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "content",
    [Call(), [Call()], {"a": 1.5, "b": (Call(), None)}, OrderedDict(a=Call()), {"long": ["x"] * 10**5, "then": Call()}],
    ids=["call", "list", "dict", "ordered", "late"],
)
def test_every_protocol_of_pickle_is_known(protocol: int, content: Any) -> None:
    assert describe_unsafe_file(pickle.dumps(content, protocol)[:LOOKED_AT]) == "a pickle"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("content", [None, 1, "text", {}, [1, 2], b"bytes"])
def test_a_marked_pickle_without_code_is_one_too(protocol: int, content: Any) -> None:
    assert describe_unsafe_file(pickle.dumps(content, protocol)) == "a pickle"


@pytest.mark.parametrize(
    "text", [b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.", b"(cos\nsystem\nS'true'\no."]
)
def test_instructions_by_hand_are_known(text: bytes) -> None:
    assert describe_unsafe_file(text) == "a pickle"


def test_archives_are_known() -> None:
    for zipped, kind in ((True, "archive"), (False, "pickle")):
        file = io.BytesIO()
        torch.save({"weight": torch.ones(3)}, file, _use_new_zipfile_serialization=zipped)
        assert kind in str(describe_unsafe_file(file.getvalue()[:LOOKED_AT]))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("{pickle"), io.BytesIO())
    assert "archive" in str(describe_unsafe_file(file.getvalue()))


def test_none_of_our_own_files_is_taken_for_code() -> None:
    tensors = {f"layer.{number}.weight": torch.randn(3, 3) for number in range(20)}
    for content in (save(tensors), json.dumps({"a": [1, 2.5, None]}).encode(), b"{}", b"[]", b"", b"{", b"\x80", b"."):
        assert describe_unsafe_file(content) is None


def test_no_length_of_a_header_makes_a_file_of_tensors_a_pickle() -> None:
    """0x80 is the mark of a pickle, and the first byte of every 256th length."""
    seen = 0
    for length in [*range(0x0080, 0x0800, 0x100), 0x2E0480, 0x4E0280, 0x580280, 0x8C0480, 0x5F5E100]:
        start = length.to_bytes(8, "little") + b'{"a":{"dtype":"F32"'
        assert describe_unsafe_file(start) is None
        assert describe_unsafe_file(start[:8] + b"|" + start[9:]) is None, "damaged in one bit"
        seen += start[:1] == b"\x80"
    assert seen >= 12
    padded = encode_header({"a": torch.ones(3)}, {"x": "y" * 500})
    assert describe_unsafe_file(padded) is None


def test_a_name_in_a_table_of_tensors_makes_it_no_archive() -> None:
    content = save({"a" * 180 + "ustar" * 20: torch.ones(3)})
    where = content.index(b"ustar")
    assert b"ustar" in {content[257 + shift : 262 + shift] for shift in range(5)}
    for shift in range(257 - where, 262 - where):
        padded = save({"a" * (180 + shift) + "ustar" * 20: torch.ones(3)})
        assert describe_unsafe_file(padded) is None


def test_a_length_that_no_header_has_hides_no_pickle() -> None:
    hidden = b"\x80\x02(X\x05\x00\x00\x00{abcd" + pickle.dumps(Call(), 2)[2:]
    assert hidden[8:9] == b"{"
    assert describe_unsafe_file(hidden) == "a pickle"


def _damaged(content: bytes, chance: random.Random) -> bytes:
    spoiled = bytearray(content)
    match chance.randrange(5):
        case 0:
            return content[: chance.randrange(len(content))]
        case 1:
            spoiled[chance.randrange(min(64, len(content)))] ^= 1 << chance.randrange(8)
        case 2:
            begin = chance.randrange(64)
            spoiled[begin : begin + 512] = bytes(512)
        case 3:
            spoiled[:512] = chance.randbytes(512)
        case _:
            return content[chance.randrange(1, len(content)) :]
    return bytes(spoiled)


def test_a_thousand_damaged_files_are_none_that_run_code() -> None:
    chance = random.Random(5)
    tensors = {f"weights/parameters/{number}.weight": torch.randn(8, 8) for number in range(30)}
    state = {"weights": {name: {"$tensor": name} for name in tensors}, "counts": list(range(300)), "words": ["a", "b"]}
    for content in (save(tensors), json.dumps(state, indent=1).encode(), json.dumps(state).encode()):
        for _ in range(1000):
            spoiled = _damaged(content, chance)
            assert describe_unsafe_file(spoiled[:LOOKED_AT]) is None, spoiled[:80]
