"""Where each sample of a tar file lies, found once and kept; nothing is unpacked."""

from __future__ import annotations

import json
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import BadData
from halfstep.files import cache_folder, write_text
from halfstep.train.data.reading import SUFFIXES

MOST_MEMBERS = 2_000_000
LARGEST_LABEL = 1_000_000
"""A larger one is a date or an id: there would be a class, and an output of the model, for each number below it."""
LARGEST_INDEX = 2**29
"""Bytes: a shard of as many members as are allowed has about half of it, with keys of usual length."""
MASKS = (".mask.png", ".seg.png")
_LABEL = ".cls"
_NONE = -1
_VERSION = 2


class Row(NamedTuple):
    """A sample: its key, where image and mask begin and how long they are, and its label; -1 for what it has not."""

    key: str
    image: int
    image_size: int
    mask: int
    mask_size: int
    label: int


def index_of(shard: Path) -> list[Row]:
    """The samples of a shard, in its order; BadData where it is no tar, or a sample in it has no image."""
    status = shard.stat()
    # The file itself, not the path to it: a set that is moved within its disk keeps its index.
    facts = (shard.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, _VERSION)
    digest = blake2b(repr(facts).encode("ascii", "backslashreplace"), digest_size=16).hexdigest()
    kept = cache_folder() / "shards" / f"{digest}.json"
    rows = _read(kept)
    if rows is None:
        rows = list(_scanned(shard))
        _keep(kept, rows, shard)
    return rows


def _read(kept: Path) -> list[Row] | None:
    try:
        return _rows(json.loads(kept.read_text(encoding="utf-8"))) if kept.stat().st_size <= LARGEST_INDEX else None
    except (OSError, ValueError):
        return None


def _keep(kept: Path, rows: list[Row], shard: Path) -> None:
    text = json.dumps(_columns(rows))
    if len(text) > LARGEST_INDEX:
        warnings.warn(
            f"the index of {shard} has {len(text):,} bytes, more than {LARGEST_INDEX:,}: it is not kept, and each run "
            "reads the whole shard before it begins; use shorter names in it, or more and smaller shards",
            stacklevel=2,
        )
        return
    with suppress(OSError):  # a cache that is full or read-only costs time, not the run
        write_text(kept, text)


def _columns(rows: list[Row]) -> dict[str, str]:
    """One string per column: a tenth of the size that a list of lists would have as JSON."""
    return {name: "\n".join(str(row[i]) for row in rows) for i, name in enumerate(Row._fields)}


def _rows(columns: Any) -> list[Row] | None:
    try:
        keys, *numbers = (columns[name].split("\n") for name in Row._fields)
        return [Row(key, *map(int, row)) for key, *row in zip(keys, *numbers, strict=True)]
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _scanned(shard: Path) -> Iterator[Row]:
    rows: dict[str, dict[str, int]] = {}
    try:
        # "r:" reads plain tar files only: a compressed one has no offsets to jump to.
        with tarfile.open(shard, "r:") as archive:
            for count, member in enumerate(archive):
                if count >= MOST_MEMBERS:
                    raise tarfile.TarError(f"more than {MOST_MEMBERS:,} members")
                if member.isfile():
                    _note(rows, archive, member)
                archive.members = []  # type: ignore[attr-defined]
    # tarfile lets some damaged headers through as the ValueError or the OverflowError that they cause.
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise _not_a_shard(shard, str(error) or type(error).__name__) from error
    for key, found in rows.items():
        if "image" not in found:
            raise _not_a_shard(shard, f"the sample {key!r} has no image ({', '.join(SUFFIXES)})")
        yield Row(key, *(found.get(name, _NONE) for name in Row._fields[1:]))
    if not rows:
        raise _not_a_shard(shard, "no sample in it")


def _note(rows: dict[str, dict[str, int]], archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """WebDataset's convention: the path up to the first dot of the file's name is the key, the rest is the kind."""
    folder, _, file = member.name.rpartition("/")
    stem, dot, rest = file.partition(".")
    kind = (dot + rest).lower()
    key = f"{folder}/{stem}" if folder else stem
    if not stem or "\n" in key:
        return
    found = rows.setdefault(key, {})
    if kind in MASKS:
        found.update(mask=member.offset_data, mask_size=member.size)
    elif kind in SUFFIXES:
        found.update(image=member.offset_data, image_size=member.size)
    elif kind == _LABEL:
        found["label"] = _label(archive, member)


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    content = archive.extractfile(member) if 0 < member.size <= 20 else None
    text = content.read().decode("ascii", "replace").strip() if content else ""
    if not text.isdecimal():
        raise tarfile.TarError(f"{member.name} holds no class number")
    if int(text) > LARGEST_LABEL:
        raise tarfile.TarError(f"{member.name} holds the class number {int(text)}, more than {LARGEST_LABEL:,}")
    return int(text)


def _not_a_shard(shard: Path, reason: str) -> BadData:
    return BadData(
        f"the shard {shard} cannot be used: {reason}",
        allowed="a plain, whole .tar of 0001.jpg with 0001.cls, or 0001.jpg with 0001.mask.png",
        do="write the shard again; unpack it first if it is compressed",
    )
