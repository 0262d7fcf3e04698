"""A file with its size and digest: written once, never over another, and every change of it is told."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import pytest

from halfstep.checkpoint import sealed
from halfstep.checkpoint.paths import Disk
from halfstep.checkpoint.sealed import SealedFile, find_file_defect, read_bounded, write_sealed
from halfstep.errors import Unsafe


class Counting(Disk):
    """How many files are open, and in how many pieces they were written."""

    def __init__(self) -> None:
        self.open, self.writes, self.flushed = 0, 0, 0

    def create(self, path: Path) -> int:
        self.open += 1
        return super().create(path)

    def write(self, file: int, content: bytes | memoryview) -> None:
        self.writes += 1
        super().write(file, content)

    def flush(self, file: int) -> None:
        self.flushed += 1
        super().flush(file)

    def close(self, file: int) -> None:
        self.open -= 1
        super().close(file)


@pytest.mark.parametrize("pieces", [[], [b""], [b"", b"a", b""], [b"abc", memoryview(b"defgh")]])
def test_pieces_become_one_file(pieces: list[bytes], tmp_path: Path) -> None:
    disk, whole = Counting(), b"".join(pieces)
    found = write_sealed(disk, tmp_path / "rank-00000.json", pieces)
    assert found == SealedFile("rank-00000.json", len(whole), hashlib.sha256(whole).hexdigest())
    assert (tmp_path / "rank-00000.json").read_bytes() == whole
    assert find_file_defect(tmp_path, found) is None
    assert (disk.open, disk.flushed) == (0, 1)


def test_a_large_piece_is_written_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "BLOCK", 1000)
    disk, content = Counting(), os.urandom(2500)
    found = write_sealed(disk, tmp_path / "a", [content, content])
    assert disk.writes == 6
    assert (tmp_path / "a").read_bytes() == content * 2
    assert find_file_defect(tmp_path, found) is None


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            write_sealed(Disk(), tmp_path / name, [b"new"])
    assert (tmp_path / "a").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_a_write_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    class Full(Counting):
        def flush(self, file: int) -> None:
            raise OSError(28, "No space left on device")

    disk = Full()
    with pytest.raises(OSError, match="No space"):
        write_sealed(disk, tmp_path / "a", [b"x"])
    assert disk.open == 0


def test_every_change_is_told(tmp_path: Path) -> None:
    found = write_sealed(Disk(), tmp_path / "a", [b"{" * 40])
    for place in range(40):
        content = bytearray(b"{" * 40)
        content[place] ^= 1
        (tmp_path / "a").write_bytes(content)
        assert find_file_defect(tmp_path, found) == "a has the right size, but a different SHA-256 than was written"
    (tmp_path / "a").write_bytes(b"{" * 39)
    assert find_file_defect(tmp_path, found) == "a has 39 bytes, 40 were written"


def test_what_is_no_file_is_told_and_never_waited_for(tmp_path: Path) -> None:
    whole = write_sealed(Disk(), tmp_path / "a", [b"{}"])
    assert find_file_defect(tmp_path, whole._replace(name="b")) == "b: No such file or directory"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        assert find_file_defect(tmp_path, whole._replace(name=name)) is not None
        with pytest.raises(OSError):
            read_bounded(tmp_path / name, 100)


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"{" * 100)
    assert read_bounded(tmp_path / "a", 100) == b"{" * 100
    with pytest.raises(OSError, match="100 bytes, more than 99"):
        read_bounded(tmp_path / "a", 99)
    (tmp_path / "empty").touch()
    assert read_bounded(tmp_path / "empty", 0) == b""


def test_a_pickle_is_refused_also_where_its_digest_fits(tmp_path: Path) -> None:
    found = write_sealed(Disk(), tmp_path / "a", [pickle.dumps({"a": [1, 2]})])
    with pytest.raises(Unsafe):
        find_file_defect(tmp_path, found)
    with pytest.raises(Unsafe):
        read_bounded(tmp_path / "a", 1000)
