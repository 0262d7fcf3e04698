"""The manifest: every byte of it counts, and nothing in it leads elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.checkpoint.paths import CheckpointDir, name_generation
from halfstep.checkpoint.sealed import (
    FORMAT,
    MANIFEST,
    Manifest,
    SealedFile,
    add_seal,
    name_state_file,
    name_tensors_file,
    read_manifest,
)
from halfstep.errors import OtherForm, Unsafe

FILES = tuple(
    SealedFile(name, size, f"{size:x}" * 64)
    for size, name in enumerate([name_tensors_file(0), name_state_file(0)], start=5)
)
WHOLE = Manifest(120, 1, FILES, {"torch": "2.10.0", "threads": 4})


@pytest.fixture
def generation(tmp_path: Path) -> CheckpointDir:
    found = name_generation(tmp_path, 120, 7)
    found.path.mkdir()
    return found


def read(generation: CheckpointDir, text: bytes) -> Manifest:
    (generation.path / MANIFEST).write_bytes(text)
    return read_manifest(generation)


def changed(**more: Any) -> bytes:
    """Another content under a seal that fits it."""
    content = {**json.loads(WHOLE.text()), **more}
    del content["seal"]
    return add_seal({key: value for key, value in content.items() if value is not None})


def test_it_comes_back_as_it_was(generation: CheckpointDir) -> None:
    found = read(generation, WHOLE.text())
    assert (found.attempt, found.world_size, set(found.files), found.environment) == (
        120,
        1,
        set(FILES),
        WHOLE.environment,
    )
    assert found.bytes == 11
    assert read(generation, found.text()).text() == found.text()


def test_every_change_of_a_byte_is_seen(generation: CheckpointDir) -> None:
    text = WHOLE.text()
    for place in range(len(text)):
        for value in {text[place] ^ 1, ord(" ")} - {text[place]}:
            with pytest.raises((ValueError, Unsafe)) as caught:
                read(generation, text[:place] + bytes([value]) + text[place + 1 :])
            assert not isinstance(caught.value, OtherForm), "damage is no other form"


def test_missing_and_added_bytes_are_seen(generation: CheckpointDir) -> None:
    text = WHOLE.text()
    for place in range(0, len(text), 7):
        for spoilt in (text[:place], text[:place] + text[place + 1 :], text[:place] + b" " + text[place:]):
            with pytest.raises(ValueError):
                read(generation, spoilt)


@pytest.mark.wording
@pytest.mark.parametrize(("form", "whose"), [(FORMAT - 1, "an earlier"), (FORMAT + 1, "a later")])
def test_another_form_is_said_to_be_one(form: int, whose: str, generation: CheckpointDir) -> None:
    with pytest.raises(OtherForm, match=f"written in form {form} by {whose} halfstep"):
        read(generation, changed(format=form, something={"new": True}))


@pytest.mark.parametrize("name", ["../rank-00000.json", "/etc/passwd", "rank-00000.json/..", "rank-0.json", "a", ""])
def test_names_that_are_paths_are_refused(name: str, generation: CheckpointDir) -> None:
    files = {name_tensors_file(0): [1, "a" * 64], name: [1, "b" * 64]}
    with pytest.raises(ValueError, match="is not a checkpoint file"):
        read(generation, changed(files=files))


@pytest.mark.parametrize(
    "more",
    [
        {"attempt": 121},
        {"attempt": -1},
        {"attempt": True},
        {"attempt": "120"},
        {"attempt": 2**60},
        {"world_size": 0},
        {"world_size": 2},
        {"world_size": 2**52},
        {"format": 0},
        {"format": True},
        {"format": "1"},
        {"files": []},
        {"files": {}},
        {"files": {name_tensors_file(0): [1]}},
        {"files": {name_tensors_file(0): None, name_state_file(0): None}},
        {"files": {name_tensors_file(0): [1, "a" * 64], name_state_file(0): [-1, "a" * 64]}},
        {"files": {name_tensors_file(0): [1, "a" * 64], name_state_file(0): [1, "A" * 64]}},
        {"files": {name_tensors_file(0): [1, "a" * 64], name_state_file(0): [1, 5]}},
        {"environment": "elsewhere"},
        {"chunks": {}},
        {"chunks": {"layouts": [[1]], "tensors": {}}},
        {"chunks": {"layouts": [[0]], "tensors": {"w": [[4], "F32", 0, 2, 0]}}},
        {"world_size": None},
        {"one more": 1},
    ],
)
def test_a_content_that_is_none_is_refused_though_it_is_sealed(more: dict[str, Any], generation: CheckpointDir) -> None:
    with pytest.raises(ValueError):
        read(generation, changed(**more))


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": 1e999}'])
def test_other_files_are_refused(text: bytes, generation: CheckpointDir) -> None:
    with pytest.raises(ValueError):
        read(generation, text)


def test_a_file_that_is_none_is_refused(generation: CheckpointDir) -> None:
    with pytest.raises(OSError):
        read_manifest(generation)
    (generation.path / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(OSError):
        read_manifest(generation)
