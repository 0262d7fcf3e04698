"""How data differs from what it was, in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faults import f10_changed_data
from faults.bad_images import encoded, picture
from faults.outcome import Outcome
from halfstep.data import fingerprint as module
from halfstep.data.file_state import BLOCK
from halfstep.data.fingerprint import NOT_READ, Fingerprint, different, fingerprint
from halfstep.data.folders import ImageFolder
from tests.data.fingerprinted import Many, OwnFiled, images_and_masks, opened, put, round_trip


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return images_and_masks(tmp_path / "set")


def test_each_change_is_said_in_words(pairs: Path) -> None:
    mask, image = pairs / "masks" / "3_mask.png", pairs / "images" / "2.png"
    before, size, content = fingerprint(opened(pairs)), mask.stat().st_size, image.read_bytes()
    put(mask, mask.read_bytes() + b"\0")
    put(image, content[:-1] + bytes([content[-1] ^ 1]))
    said = different(before, fingerprint(opened(pairs)))
    assert said == ["2 files changed, the first images/2.png (same size, other content)"]
    put(image, content)
    said = different(before, fingerprint(opened(pairs)))
    assert said == [f"1 file changed: masks/3_mask.png ({size:,} bytes -> {size + 1:,} bytes)"]
    put(mask, mask.read_bytes()[:-1])
    for n in (7, 8):
        put(pairs / "images" / f"{n}.png", b"new %d" % n)
        put(pairs / "masks" / f"{n}.png", b"new mask %d" % n)
    after = fingerprint(opened(pairs))
    assert different(before, after) == ["4 files added, the first images/7.png"]
    assert different(after, before) == ["4 files removed, the first images/7.png"]


def test_a_file_with_another_name_is_renamed_and_not_new(pairs: Path) -> None:
    before = fingerprint(opened(pairs))
    (pairs / "masks" / "4_mask.png").rename(pairs / "masks" / "4.png")
    assert different(before, fingerprint(opened(pairs))) == ["1 file renamed: masks/4_mask.png -> masks/4.png"]


def test_equal_files_are_renamed_one_by_one(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path / name, b"same")
    before = fingerprint(OwnFiled(tmp_path, ["a", "b"]))
    assert different(before, fingerprint(OwnFiled(tmp_path, ["c"]))) == [
        "1 file renamed: a -> c",
        "1 file removed: b",
    ]


def test_a_file_that_goes_from_training_to_validation_is_seen(tmp_path: Path) -> None:
    for name in ("train/cat/a.png", "train/cat/b.png", "val/cat/a.png"):
        put(tmp_path / name, encoded(picture(len(name))))

    def both() -> Fingerprint:
        return fingerprint(ImageFolder(tmp_path / "train"), ImageFolder(tmp_path / "val"))

    before = both()
    assert different(before, both()) == []
    (tmp_path / "train/cat/b.png").rename(tmp_path / "val/cat/b.png")
    assert different(before, both()) == ["train: 1 file removed: cat/b.png", "val: 1 file added: cat/b.png"]
    assert different(before, fingerprint(ImageFolder(tmp_path / "val"))) == ["1 source of samples, saved 2"]
    three = fingerprint(*[Many(1)] * 3)
    assert different(three, fingerprint(Many(1), Many(1), Many(2)), ["a", "b"]) == ["source 3: 1 sample added: 0000001"]


def test_odd_names_survive_json_and_are_harmless_to_a_terminal(tmp_path: Path) -> None:
    names = ["a\nb", "esc\x1b[31m", "two  words 3", os.fsdecode(b"\xff.png"), "ü" * 60]
    for name in names:
        put(tmp_path / name, name.encode("utf-8", "surrogateescape"))
    before = fingerprint(OwnFiled(tmp_path, names))
    assert round_trip(before) == before
    for name in names:
        one = [other for other in names if other != name]
        (line,) = different(before, fingerprint(OwnFiled(tmp_path, one)))
        assert line.isprintable()
        assert line.encode()
    long = [f"folder/{'x' * 500}/{n}" for n in range(2)]
    (line,) = different(fingerprint(OwnFiled(tmp_path, long[:1])), fingerprint(OwnFiled(tmp_path, long)))
    assert len(line) < 150
    assert line.endswith("xxx/1")


def test_there_are_never_more_than_twenty_lines() -> None:
    before = fingerprint(*[Many(1)] * 30)
    assert len(different(before, fingerprint(*[Many(2)] * 30))) == 20


def test_a_set_that_grew_over_the_limit_names_what_came_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WHOLE_BYTES", 5 * BLOCK)
    put(tmp_path / "a", bytes(5 * BLOCK))
    put(tmp_path / "b", b"more")
    before, now = fingerprint(OwnFiled(tmp_path, ["a"])), fingerprint(OwnFiled(tmp_path, ["a", "b"]))
    assert (before.whole, now.whole) == (True, False)
    assert different(before, now) == ["1 file added: b"]
    monkeypatch.setattr(module, "MOST_ROWS", 1)
    now = fingerprint(OwnFiled(tmp_path, ["a", "b"]))
    assert different(before, now) == ["2 files, saved 1", "5,242,884 bytes in all, saved 5,242,880"]


@pytest.mark.full
def test_the_row_of_the_matrix_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f10_changed_data, "FILES", 800)
    monkeypatch.setattr(f10_changed_data, "UNCHANGED", 4)
    assert f10_changed_data.run(full=False) == Outcome(9, 9, "none")
    monkeypatch.setattr(module, "_read_content_digest", lambda path, starts: NOT_READ)
    assert f10_changed_data.run(full=False) == Outcome(8, 9, "wrong: edited, same size")
    # The time of a file as its content: what is touched or copied looks changed.
    monkeypatch.setattr(module, "_read_content_digest", lambda path, starts: f"{os.stat(path).st_mtime_ns:016x}")
    assert f10_changed_data.run(full=False).worst == "wrong: copied, edited, same size, moved, touched"
