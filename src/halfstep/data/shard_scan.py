"""Scan a shard once: the place, label and digest of each of its samples, as columns. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from halfstep.data.image_files import MOST_BYTES, SUFFIXES
from halfstep.data.layout import PLACE_PERSON
from halfstep.data.parquet_file import scan_parquet
from halfstep.data.shard_rows import LARGEST_LABEL, MASK_PERSON, NONE, PARQUET, Column, ShardRows
from halfstep.data.tar_members import BLOCK, DamagedTar, Member, TarReader, open_tar
from halfstep.errors import BadData
from halfstep.numbers import format_counted_noun

LAYOUT = "a plain, whole .tar of 0001.jpg with 0001.cls, or 0001.jpg with 0001.mask.png"
LONGEST_LABEL = 20
"""Bytes of a label's file: anything longer is no class number, and is not read."""
_BEGIN, _HASH, _IMAGE, _IMAGE_SIZE, _IMAGE_DIGEST, _MASK, _MASK_SIZE, _MASK_DIGEST, _LABEL, _LABEL_AT = range(10)
"""The numbers of a sample while its shard is read."""
_NOTHING = 2**64 - 1
_NO_PARTS = (*(_NOTHING, _NOTHING, 0) * 2, _NOTHING, _NOTHING)
_WIDTH = 10
_PARTS = {suffix[1:].encode(): _IMAGE for suffix in SUFFIXES} | {b"mask.png": _MASK, b"seg.png": _MASK, b"cls": _LABEL}
_MOST_PARTS = 1000
_LARGEST_SHARD = 2**32 * BLOCK
_MOST_SIZE = 2**32 - 1

ARCHIVES = (".tar", PARQUET, ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".zip")
"""Files that hold samples in most sets; a run reads those of one kind."""


def list_unread_names(names: Iterable[str], read: Collection[str]) -> list[str]:
    """Return the names of the archives that are not among those that are read."""
    every, others = set(read), (name for name in names if name.lower().endswith(ARCHIVES))
    return sorted(name for name in others if name not in every and "/." not in f"/{name}")


def describe_unread_files(unread: Sequence[str], where: str) -> str:
    """Return a line on the archives that are not read; empty if there are none."""
    if not unread:
        return ""
    more = f" and {len(unread) - 3:,} more" if len(unread) > 3 else ""
    return f"{format_counted_noun(len(unread), 'file')} in {where} not read: {', '.join(unread[:3])}{more}"


def build_shard_error(shard: str | Path, reason: str, allowed: str = LAYOUT) -> BadData:
    """Return the error for a shard that cannot be used; it names the command that unpacks a compressed one."""
    with suppress(OSError), open(shard, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            unpacked = f"gunzip {shard}, and the others likewise"
            return BadData(
                f"the shard {shard} cannot be used: it is compressed, and a compressed file cannot be read by offset",
                allowed=allowed,
                do=unpacked if str(shard).endswith((".gz", ".tgz")) else f"mv {shard} {shard}.gz && gunzip {shard}.gz",
            )
    return BadData(f"the shard {shard} cannot be used: {reason}", allowed=allowed, do="write the shard again")


def scan_shard(shard: Path, is_stopped: Callable[[], bool] = lambda: False) -> ShardRows:
    """Read a shard once; raise BadData, with its name, where it is no tar or a sample cannot be used."""
    try:
        if shard.suffix == PARQUET:
            return scan_parquet(shard)
        with open_tar(shard) as tar:
            return scan_tar(tar, shard.name, is_stopped)
    except DamagedTar as error:
        raise build_shard_error(shard, str(error)) from None
    except OSError as error:
        raise build_shard_error(shard, error.strerror or type(error).__name__) from error


def scan_tar(tar: TarReader, name: str, is_stopped: Callable[[], bool]) -> ShardRows:
    """Read an open shard of this file name once; raise DamagedTar if it cannot be used."""
    if tar.size > _LARGEST_SHARD:
        raise DamagedTar(f"{tar.size:,} bytes, more than {_LARGEST_SHARD:,}")
    rows, last, seen = array("Q"), None, set[bytes]()
    start = blake2b(name.encode("utf-8", "surrogateescape") + b"/", digest_size=8, person=PLACE_PERSON)
    for member in tar.members():
        if is_stopped():
            raise CancelledError
        folder, _, file = member.name.rpartition(b"/")
        stem, _, kind = file.partition(b".")
        # WebDataset's convention: the key ends at the first dot of the file name.
        key = folder + b"/" + stem if folder else stem
        if not stem or b"\n" in key:
            continue
        if key != last:
            name_hash = start.copy()
            name_hash.update(key)
            rows.extend((member.begin, int.from_bytes(name_hash.digest(), "big"), *_NO_PARTS))
            last = key
            seen.clear()
        if member.name in seen:
            raise DamagedTar(f"two members are called {decode_member_name(member.name)}")
        seen.add(member.name)
        if len(seen) > _MOST_PARTS:
            raise DamagedTar(f"the sample {decode_member_name(key)!r} has more than {_MOST_PARTS:,} members")
        part = _PARTS.get(kind) if kind in _PARTS else _PARTS.get(kind.lower())
        if part is not None:
            _record_part(tar, rows, part, member)
    if not rows:
        raise DamagedTar("no sample in it")
    return _build_shard_rows(tar, rows)


def has_sample_after(tar: TarReader, at: int) -> bool:
    """Return whether a part of a sample follows the member that ends at or before a byte."""
    kinds = (member.name.rpartition(b"/")[2].partition(b".")[2] for member in tar.members(-(-at // BLOCK) * BLOCK))
    return any(kind.lower() in _PARTS for kind in kinds)


def _record_part(tar: TarReader, rows: array[int], part: int, member: Member) -> None:
    _, name, at, size = member
    if part == _LABEL:
        rows[_LABEL - _WIDTH] = parse_label(
            tar.read(at, size) if 0 < size <= LONGEST_LABEL else b"", decode_member_name(name)
        )
        rows[_LABEL_AT - _WIDTH] = at
        return
    place = len(rows) - _WIDTH + part
    rows[place], rows[place + 1] = at, min(size, _MOST_SIZE)
    if size <= MOST_BYTES:  # a larger one is a bad sample, and is not read
        rows[place + 2] = tar.digest(at, size, MASK_PERSON if part == _MASK else b"")


def parse_label(content: bytes, name: str) -> int:
    """Return the class number that a label's file holds; raise DamagedTar if it holds none."""
    text = content.decode("ascii", "replace").strip()
    if not text.isdecimal():
        raise DamagedTar(f"{name} contains no class number")
    if int(text) > LARGEST_LABEL:
        raise DamagedTar(f"{name} contains the class number {int(text)}, more than {LARGEST_LABEL:,}")
    return int(text)


def parse_padded_label(content: bytes) -> int:
    """Return the class number at the start of some bytes; -1 if there is none."""
    with suppress(DamagedTar):
        return parse_label(content.split(b"\0", 1)[0], "")
    return NONE


def decode_member_name(name: bytes) -> str:
    """Return the name of a member as text."""
    return name.decode("utf-8", "surrogateescape")


def read_member_key(tar: TarReader, begin: int, image: int | None = None) -> str:
    """Return the key of the member whose headers start at a byte, or of a later one whose content is at `image`."""
    for member in tar.members(begin):
        if image is None or member.at == image:
            folder, _, file = member.name.rpartition(b"/")
            stem = file.partition(b".")[0]
            return decode_member_name(folder + b"/" + stem if folder else stem)
        if member.at > image:
            break
    raise DamagedTar(f"no file starts at byte {image or begin:,}")


def _build_shard_rows(tar: TarReader, rows: array[int]) -> ShardRows:
    """Return the columns, with one row for parts of a sample that lie apart."""
    table = np.frombuffer(rows, np.uint64).reshape(-1, _WIDTH)
    if len(np.unique(table[:, _HASH])) < len(table):
        table = _merge_split_samples(tar, table)
    lacking = np.flatnonzero(table[:, _IMAGE] == _NOTHING)
    if len(lacking):
        key = read_member_key(tar, int(table[lacking[0], _BEGIN]))
        raise DamagedTar(f"the sample {key!r} has no image ({', '.join(SUFFIXES)}); its name ends at the first dot")
    columns, signed = table.T, table.view(np.int64).T
    places = (columns[_HASH] >> np.uint64(32)).astype("<u4")
    digests = columns[_IMAGE_DIGEST] ^ columns[_MASK_DIGEST]
    rest = (signed[one] for one in (_MASK, _MASK_SIZE, _LABEL_AT))
    return ShardRows(tar.size, signed[_IMAGE], signed[_IMAGE_SIZE], signed[_LABEL], places, digests, *rest)


def _merge_split_samples(tar: TarReader, table: Column) -> Column:
    _, first, which = np.unique(table[:, _HASH], return_index=True, return_inverse=True)
    # Samples are in the order of their first parts.
    which, found = np.argsort(np.argsort(first))[which], table[np.sort(first)]
    for part, end in ((_IMAGE, _MASK), (_MASK, _LABEL), (_LABEL, _WIDTH)):
        has = np.flatnonzero(table[:, part] != _NOTHING)
        times = np.bincount(which[has], minlength=len(found))
        if (times > 1).any():
            twice = has[which[has] == np.argmax(times > 1)][1]
            raise DamagedTar(f"two samples have the key {read_member_key(tar, int(table[twice, _BEGIN]))!r}")
        found[which[has], part:end] = table[has, part:end]
    return found
