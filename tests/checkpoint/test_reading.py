"""Checkpoints are read with suspicion: every byte, and nothing that nobody wrote."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.checkpoint.commit import RankSnapshot, commit_checkpoint
from halfstep.checkpoint.paths import Disk, list_generations
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state, verify_checkpoint
from halfstep.checkpoint.sealed import MANIFEST, MOST_TENSORS, add_seal
from halfstep.distributed import RankGroup
from halfstep.errors import BadData, NoCheckpoint, OtherForm, Unsafe

TENSORS, STATE = "rank-00000.safetensors", "rank-00000.json"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    for attempt in (1, 2):
        snapshot = RankSnapshot(
            attempt, {"at": attempt}, {"w": torch.full((4,), float(attempt)), "none": torch.ones(0, 2)}
        )
        commit_checkpoint(folder, snapshot, keep=2, disk=Disk(), party=RankGroup())
    return folder


def newest(place: Path) -> Path:
    return list_generations(place)[0].path


def fallen_back(place: Path) -> bool:
    """Whether the checkpoint of step 1 is taken, and what is wrong with the other one is said."""
    verdict, damaged = find_newest_intact(place)
    return verdict is not None and verdict.generation.attempt == 1 and [bool(one.problem) for one in damaged] == [True]


def with_header(place: Path, header: bytes, numbers: bytes = b"") -> None:
    (newest(place) / TENSORS).write_bytes(struct.pack("<Q", len(header)) + header + numbers)


def test_the_newest_is_read_as_it_was_written(place: Path) -> None:
    verdict, damaged = find_newest_intact(place)
    assert verdict is not None
    assert (verdict.generation.attempt, damaged) == (2, [])
    plain, tensors = read_rank_state(verdict.generation, 0)
    assert plain == {"at": 2}
    assert torch.equal(tensors["w"], torch.full((4,), 2.0))
    assert tensors["none"].shape == (0, 2)


def test_progress_is_told_in_bytes(place: Path) -> None:
    told: list[int] = []
    verdict = verify_checkpoint(list_generations(place)[0], told.append)
    assert verdict.manifest is not None
    assert sum(told) == verdict.manifest.bytes > 0


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_a_wrong_byte_anywhere_is_seen_and_the_one_before_is_taken(place: Path, name: str) -> None:
    file = newest(place) / name
    whole = file.read_bytes()
    for where in range(0, len(whole), 7):
        file.write_bytes(whole[:where] + bytes([whole[where] ^ 4]) + whole[where + 1 :])
        assert fallen_back(place), f"byte {where} of {name}"
    file.write_bytes(whole)
    assert verify_checkpoint(list_generations(place)[0]).problem is None


@pytest.mark.wording
def test_where_none_is_whole_that_is_an_error_and_no_new_beginning(place: Path) -> None:
    for generation in list_generations(place):
        (generation.path / STATE).unlink()
    with pytest.raises(NoCheckpoint, match=r"step-00000002\.0002: .*No such file") as caught:
        find_newest_intact(place)
    assert caught.value.exit_code == 65
    assert find_newest_intact(place.with_name("nothing")) == (None, [])


@pytest.mark.wording
@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST, ".metadata", "notes.txt"])
def test_code_in_a_checkpoint_ends_it_and_nothing_is_passed_over(place: Path, name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (newest(place) / name).write_bytes(f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode())
    with pytest.raises(Unsafe, match="a pickle, which can run code"):
        find_newest_intact(place)
    assert not canary.exists()


def test_a_file_of_somebody_else_does_no_harm(place: Path) -> None:
    (newest(place) / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (newest(place) / "folder").mkdir()
    os.mkfifo(newest(place) / "pipe")
    assert verify_checkpoint(list_generations(place)[0]).problem is None


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/hostname")])
@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_what_is_no_file_is_not_read(place: Path, name: str, make: Callable[[Path], Any]) -> None:
    (newest(place) / name).unlink()
    make(newest(place) / name)
    assert fallen_back(place)


def test_a_checkpoint_that_lies_elsewhere_is_none(place: Path, tmp_path: Path) -> None:
    shutil.move(newest(place), tmp_path / "elsewhere")
    place.joinpath("step-00000002.0002").symlink_to(tmp_path / "elsewhere")
    verdict = verify_checkpoint(list_generations(place)[0])
    assert verdict.problem == "a link instead of a folder"


@pytest.mark.wording
@pytest.mark.parametrize(("form", "whose", "do"), [(1, "an earlier", "use the version"), (99, "a later", "--upgrade")])
def test_another_form_is_refused_by_name_and_not_passed_over(place: Path, form: int, whose: str, do: str) -> None:
    manifest = json.loads((newest(place) / MANIFEST).read_text())
    manifest.pop("seal")
    (newest(place) / MANIFEST).write_bytes(add_seal({**manifest, "format": form}))
    with pytest.raises(OtherForm, match=f"written in form {form} by {whose} halfstep") as caught:
        find_newest_intact(place)
    assert caught.value.exit_code == 79
    assert do in caught.value.do


def entry(**changes: Any) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}).encode()


@pytest.mark.wording
@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        entry(shape=[5]),
        entry(dtype="F99"),
        entry(data_offsets=[-16, 0]),
        entry(data_offsets=[16, 32]),
        entry(shape=[0, 2**63], data_offsets=[0, 0]),
        entry(shape=[1] * 65 + [4]),
        entry(shape="4"),
        entry(shape=None),
        b'{"w":5}',
        entry()[:-1] + b"," + entry()[1:],
        b"[" * 100_000,
        b'{"__metadata__":{"a":"' + b"x" * 17_000_000 + b'"}}',
        json.dumps(dict.fromkeys(map(str, range(MOST_TENSORS + 1)), 0)).encode(),
    ],
    ids=range(17),
)
def test_a_table_that_nobody_writes_is_refused_in_words(place: Path, header: bytes) -> None:
    with_header(place, header, bytes(16))
    with pytest.raises(BadData, match=r"cannot be read: .+") as caught:
        read_rank_state(list_generations(place)[0], 0)
    assert len(str(caught.value)) < 1000


@pytest.mark.wording
def test_a_length_beyond_the_file_is_refused(place: Path) -> None:
    for length in (2**63, 2**64 - 1, 2**24 + 1, 10_000):
        (newest(place) / TENSORS).write_bytes(struct.pack("<Q", length) + entry() + bytes(16))
        with pytest.raises(BadData, match="cannot be read"):
            read_rank_state(list_generations(place)[0], 0)


@pytest.mark.wording
@pytest.mark.parametrize(
    "text", ["", "{", '{"a":NaN}', '{"a":1e999}', '{"a":-1e999}', '{"a":1,"a":2}', "[" * 10**5, "9" * 5000, "\x00"]
)
def test_json_that_nobody_writes_is_refused_in_words(place: Path, text: str) -> None:
    (newest(place) / STATE).write_text(text)
    with pytest.raises(BadData, match=r"cannot be read: .+"):
        read_rank_state(list_generations(place)[0], 0)


def test_a_pickle_is_refused_at_reading_too(place: Path) -> None:
    (newest(place) / STATE).write_bytes(pickle.dumps({"at": 2}))
    with pytest.raises(Unsafe):
        read_rank_state(list_generations(place)[0], 0)
