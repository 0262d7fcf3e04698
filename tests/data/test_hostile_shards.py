"""Shards that are damaged or made to hurt: each is refused by name, in bounded time and memory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from halfstep.data import tar_members
from halfstep.data.shard_scan import scan_shard
from halfstep.errors import BadData

MOST_MEGABYTES, MOST_SECONDS = 200, 5.0
BASE_256 = b"\x80" + (2**40).to_bytes(11, "big")


def header(name: bytes, size: int = 0, kind: bytes = b"0", field: bytes | None = None, prefix: bytes = b"") -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[124:136] = field if field is not None else b"%011o\0" % size
    block[148:157], block[257:265] = b" " * 8 + kind, b"ustar\x0000"
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: bytes, content: bytes = b"x", kind: bytes = b"0") -> bytes:
    return header(name, len(content), kind) + content + bytes(-len(content) % 512)


def pax(**records: str) -> bytes:
    lines = b""
    for key, value in records.items():
        rest = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(rest) + len(str(len(rest) + 2))
        lines += b"%d" % length + rest
    return member(b"pax", lines, b"x")


def damaged_checksum(content: bytes, at: int) -> bytes:
    return content[: at + 10] + b"!" + content[at + 11 :]


GOOD = member(b"1.jpg") + member(b"1.cls", b"1")
END = bytes(1024)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "shorter than a header": lambda: b"x" * 100,
    "noise": lambda: os.urandom(51_200),
    "zeros": lambda: bytes(10_240),
    "gzip": lambda: b"\x1f\x8b\x08" + os.urandom(5000),
    "another header": lambda: damaged_checksum(GOOD, 0) + END,
    "another second header": lambda: damaged_checksum(GOOD, 1024) + END,
    "no size": lambda: header(b"1.jpg", field=b"zzzzzzzzzzz\0") + END,
    "a negative size": lambda: header(b"1.jpg", field=b"-0000000001\0") + END,
    "a negative base-256 size": lambda: header(b"1.jpg", field=b"\xff" * 12) + END,
    "a base-256 size past the end": lambda: header(b"1.jpg", field=BASE_256) + END,
    "a size past the end": lambda: GOOD + header(b"2.jpg", 10**9) + END,
    "cut in a member": lambda: GOOD + member(b"2.jpg", bytes(5000))[:2000],
    "cut in a header": lambda: GOOD + header(b"2.jpg", 1)[:300],
    "a sparse member": lambda: GOOD + member(b"2.jpg", kind=b"S") + END,
    "a sparse member by pax": lambda: GOOD + pax(GNU__sparse__map="0,1") + member(b"2.jpg") + END,
    "a pax size past the end": lambda: pax(size="99999999999") + member(b"1.jpg") + END,
    "a pax size that is none": lambda: pax(size="-5") + member(b"1.jpg") + END,
    "a pax length that lies": lambda: member(b"p", b"999999 path=a.jpg\n", b"x") + GOOD + END,
    "pax records without end": lambda: member(b"p", b"0 a=b\n", b"x") + GOOD + END,
    "a long name of a megabyte": lambda: member(b"L", b"a" * 2**20, b"L") + GOOD + END,
    "a chain of long names": lambda: member(b"L", b"a.jpg\0", b"L") * 5000 + GOOD + END,
    "a long name without its member": lambda: GOOD + member(b"L", b"b.jpg\0", b"L"),
    "two members of a name": lambda: member(b"1.jpg") * 2 + END,
    "a key that comes twice": lambda: GOOD + member(b"2.jpg") + member(b"2.cls", b"1") + GOOD + END,
    "a sample of very many parts": lambda: b"".join(member(b"1.%d" % n) for n in range(3000)) + END,
    "no image": lambda: member(b"1.cls", b"1") + END,
    "a label of a megabyte": lambda: member(b"1.jpg") + member(b"1.cls", b"9" * 2**20) + END,
    "a label beyond all classes": lambda: member(b"1.jpg") + member(b"1.cls", b"99999999") + END,
    "folders only": lambda: member(b"d/", b"", b"5") + END,
    "names that are only dots": lambda: member(b".jpg") + member(b"a/.jpg") + END,
}
SCAN = """
import json, sys, time
from pathlib import Path
from halfstep.data.shard_scan import scan_shard
from halfstep.errors import BadData
said = {}
for path in sorted(Path(sys.argv[1]).glob("*.tar")):
    began = time.process_time()
    try:
        scan_shard(path)
        what = ""
    except BadData as error:
        what = str(error)
    said[path.name] = [what, time.process_time() - began]
status = Path("/proc/self/status").read_text()
print(json.dumps([said, int(status.partition("VmHWM:")[2].split()[0]) / 1024]))
"""


def scanned(folder: Path) -> tuple[dict[str, tuple[str, float]], float]:
    """Return what is said of each shard and its processor seconds, and the most memory of the process in MB."""
    done = subprocess.run([sys.executable, "-c", SCAN, str(folder)], check=True, capture_output=True, text=True)
    said, memory = json.loads(done.stdout)
    return said, memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.wording
def test_each_is_refused_by_name_in_little_time_and_memory(tmp_path: Path) -> None:
    assert len(HOSTILE) >= 30
    for name, make in HOSTILE.items():
        (tmp_path / f"{name}.tar").write_bytes(make())
    said, memory = scanned(tmp_path)
    assert {name for name, (what, _) in said.items() if name not in what} == set()
    assert max(seconds for _, seconds in said.values()) < MOST_SECONDS
    assert memory < MOST_MEGABYTES


def test_names_with_escapes_and_base_256_sizes_are_samples(tmp_path: Path) -> None:
    names = [b"\x1b[31m.jpg", b"../../up.jpg", b"a\xff\xfe.jpg", "Käse".encode() + b".jpg"]
    parts = [member(name) for name in names]
    parts.append(header(b"big.jpg", field=b"\x80" + (700).to_bytes(11, "big")) + bytes(1024))
    (tmp_path / "a.tar").write_bytes(b"".join(parts) + END)
    rows = scan_shard(tmp_path / "a.tar")
    assert rows.image_size.tolist() == [1, 1, 1, 1, 700]


def many(path: Path, count: int) -> Path:
    with open(path, "wb") as file:
        for number in range(count):
            file.write(header(b"%08d.jpg" % number))
        file.write(END)
    return path


@pytest.mark.wording
def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_members, "MOST_MEMBERS", 1000)
    assert len(scan_shard(many(tmp_path / "most.tar", 1000)).image) == 1000
    with pytest.raises(BadData, match=r"more\.tar cannot be used: more than 1,000 members"):
        scan_shard(many(tmp_path / "more.tar", 1001))


@pytest.mark.full
def test_the_most_members_and_one(tmp_path: Path) -> None:
    many(tmp_path / "many.tar", tar_members.MOST_MEMBERS + 1)
    said, memory = scanned(tmp_path)
    what, seconds = said["many.tar"]
    assert "many.tar" in what
    assert seconds < 90.0
    assert memory < MOST_MEGABYTES


def test_a_member_of_a_tarfile_with_every_kind_of_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(3):
            one = tarfile.TarInfo(f"{'long' * 60}/{number}.jpg")
            one.size = 3
            archive.addfile(one, io.BytesIO(b"abc"))
    assert len(scan_shard(tmp_path / "a.tar").image) == 3
