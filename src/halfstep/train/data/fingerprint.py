"""What the data of a run is, small enough for a checkpoint: a run that goes on with other data is another run.

Names, sizes and contents count; times, and where the set lies, do not. Of a large set the contents are sampled.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from halfstep.errors import StateMismatch
from halfstep.train.data.source import Source, files_of
from halfstep.train.data.split import key_of

MOST_WHOLE_BYTES = 2**30
"""A source with more has its contents sampled: every name and size, and parts of some files."""
SAMPLED_FILES = 256
BLOCK, BLOCKS = 2**20, 4
"""Bytes read at once, and how many such blocks of a sampled file: together at most 1 GiB is read."""
MOST_ROWS, MOST_ROW_TEXT = 20_000, 2 * 2**20
"""Above this many files, or characters, there are only groups: a checkpoint's JSON must stay small."""
GROUPS = 256
MOST_KEYS = 1_000_000
UNREADABLE, NOT_READ = "unreadable", "-"
_VERSION = 1
_CONTENT = re.compile(rf"[0-9a-f]{{16}}|{UNREADABLE}|{NOT_READ}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


class Row(NamedTuple):
    """A file: its name below the root, its bytes and 16 hex digits of its content; or a sample without a file."""

    key: str
    size: int
    content: str


@dataclass(frozen=True)
class Part:
    """What one source is."""

    samples: int
    order: str
    """Of the names of the samples, by number: the order of training is an order of numbers."""
    of: Literal["file", "sample"]
    """What the rows are: samples, where the source names no files."""
    count: int
    size: int
    whole: bool
    """Whether every content was read."""
    digest: str
    """Of all groups, and so of all rows."""
    rows: tuple[Row, ...] | None
    groups: tuple[str, ...] | None
    """A digest for each group of rows, by the hash of their names; only where there are too many rows to keep."""

    def by_group(self) -> tuple[str, ...]:
        return _grouped(self.rows) if self.rows is not None else self.groups or ()


@dataclass(frozen=True)
class Fingerprint:
    """What the sources of a run are."""

    parts: tuple[Part, ...]

    @property
    def whole(self) -> bool:
        return all(part.whole for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        return {"version": _VERSION, "parts": [_plain(part) for part in self.parts]}

    @classmethod
    def from_dict(cls, saved: Any) -> Fingerprint:
        """What `as_dict` gave; StateMismatch for anything else, and where its digests do not fit its rows."""
        try:
            version, parts = _exactly(saved, "version", "parts")
            _must(version == _VERSION and _is(version, int), f"version {version!r}")
            _must(_is(parts, list), "parts")
            return cls(tuple(_part_from(part) for part in parts))
        except _Wrong as error:
            raise StateMismatch(
                f"a fingerprint of data that cannot be read: {error}",
                allowed=f"what this version of halfstep saves (version {_VERSION})",
                do="use another checkpoint, or resume with the version that saved it",
            ) from error


def fingerprint(*sources: Source) -> Fingerprint:
    """What these sources are now. Reads up to 1 GiB of each; a file of several sources is read once."""
    contents: dict[tuple[str, bool], str] = {}
    return Fingerprint(tuple(_part_of(source, contents) for source in sources))


def _part_of(source: Source, contents: dict[tuple[str, bool], str]) -> Part:
    keys = _below([key_of(source, number) for number in range(min(len(source), MOST_KEYS))])
    order = _digest(f"{len(key)}:{key}" for key in keys)
    # A shard is the file of all its samples: it counts once.
    found = dict.fromkeys((key, os.fspath(path)) for i in range(len(source)) for key, path in files_of(source, i))
    rows = [Row(key, 0, NOT_READ) for key in keys]
    whole = True
    if found:
        rows, whole = _rows(list(found), contents)
    rows.sort()
    groups = _grouped(rows)
    few = len(rows) <= MOST_ROWS and sum(len(json.dumps(_text(row))) for row in rows) <= MOST_ROW_TEXT
    return Part(
        samples=len(source),
        order=order,
        of="file" if found else "sample",
        count=len(rows),
        size=sum(row.size for row in rows),
        whole=whole,
        digest=_digest(groups),
        rows=tuple(rows) if few else None,
        groups=None if few else groups,
    )


def _rows(found: list[tuple[str, str]], contents: dict[tuple[str, bool], str]) -> tuple[list[Row], bool]:
    sizes = [_size(path) for _, path in found]
    whole = sum(size or 0 for size in sizes) <= MOST_WHOLE_BYTES
    read = {key for key, _ in found} if whole else _chosen(key for key, _ in found)
    rows = []
    for (key, path), size in zip(found, sizes, strict=True):
        if size is None:
            rows.append(Row(key, 0, UNREADABLE))
        elif key not in read:
            rows.append(Row(key, size, NOT_READ))
        else:
            if (path, whole) not in contents:
                contents[path, whole] = _content(path, _starts(size, whole))
            rows.append(Row(key, size, contents[path, whole]))
    return rows, whole


def _chosen(keys: Iterable[str]) -> set[str]:
    """As if by lot, and by name: evenly spaced ones would all be others as soon as a file is added."""
    return set(heapq.nsmallest(SAMPLED_FILES, set(keys), key=lambda key: (_digest([key]), key)))


def _size(path: str) -> int | None:
    """None for what cannot be read as a file: a pipe would be waited for, for ever."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _starts(size: int, whole: bool) -> Iterable[int]:
    """Where blocks begin: all of them, or a few from the first byte to the last."""
    if whole or size <= BLOCK * BLOCKS:
        return range(0, size, BLOCK)
    return [(size - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)]


def _content(path: str, starts: Iterable[int]) -> str:
    digest = sha256()
    try:
        with open(path, "rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(BLOCK))
    except OSError:  # a sample that cannot be read is replaced when its turn comes
        return UNREADABLE
    return digest.hexdigest()[:16]


def _below(keys: list[str]) -> list[str]:
    """Names that are paths, below the folder that holds them all: a source without keys may be moved, too."""
    if not keys or not all(map(os.path.isabs, keys)):
        return keys
    try:
        root = os.path.commonpath({os.path.dirname(key) for key in keys})
    except ValueError:  # on several drives
        return keys
    return [os.path.relpath(key, root).replace(os.sep, "/") for key in keys]


def _grouped(rows: Iterable[Row]) -> tuple[str, ...]:
    """A digest for each group of sorted rows. A row's group is decided by its name alone."""
    groups = [sha256() for _ in range(GROUPS)]
    for row in rows:
        content = f"{len(row.key)}:{row.key}{row.size} {row.content}\n"
        groups[int(_digest([row.key]), 16) % GROUPS].update(content.encode("utf-8", "surrogatepass"))
    return tuple(group.hexdigest()[:16] for group in groups)


def _digest(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _text(row: Row) -> str:
    return f"{row.content} {row.size} {row.key}"


def _plain(part: Part) -> dict[str, Any]:
    rows = None if part.rows is None else [_text(row) for row in part.rows]
    return asdict(replace(part, rows=None)) | {"rows": rows, "groups": part.groups and list(part.groups)}


class _Wrong(Exception):
    """What is wrong with a saved fingerprint."""


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise _Wrong(f"{what[:80]} is not what was expected")


def _is(value: object, kind: type) -> bool:
    return type(value) is kind


def _exactly(saved: Any, *names: str) -> list[Any]:
    _must(isinstance(saved, Mapping) and set(saved) == set(names), f"{saved!r}")
    return [saved[name] for name in names]


def _part_from(saved: Any) -> Part:
    numbers = ("samples", "count", "size")
    names = (*numbers, "order", "of", "whole", "digest", "rows", "groups")
    given = dict(zip(names, _exactly(saved, *names), strict=True))
    for name in numbers:
        _must(_is(given[name], int) and given[name] >= 0, name)
    for name in ("order", "digest"):
        _must(_is_digest(given[name]), name)
    _must(given["of"] in ("file", "sample") and _is(given["whole"], bool), "of or whole")
    rows, groups = given["rows"], given["groups"]
    _must((rows is None) != (groups is None), "both or none of rows and groups")
    given["rows"] = None if rows is None else _rows_from(rows, given)
    given["groups"] = None if groups is None else _groups_from(groups)
    part = Part(**given)
    _must(_digest(part.by_group()) == part.digest, "the digest")
    return part


def _rows_from(saved: Any, given: Mapping[str, Any]) -> tuple[Row, ...]:
    _must(_is(saved, list), "rows")
    rows = tuple(map(_row_from, saved))
    _must(len(rows) == given["count"] and sum(row.size for row in rows) == given["size"], "the count or the size")
    return rows


def _row_from(saved: Any) -> Row:
    parts = saved.split(" ", 2) if _is(saved, str) else []
    _must(len(parts) == 3 and bool(_CONTENT.fullmatch(parts[0])), f"the row {saved!r}")
    _must(parts[1].isdecimal() and parts[1].isascii() and len(parts[1]) < 19, f"the row {saved!r}")
    return Row(parts[2], int(parts[1]), parts[0])


def _groups_from(saved: Any) -> tuple[str, ...]:
    _must(_is(saved, list) and len(saved) == GROUPS and all(map(_is_digest, saved)), "groups")
    return tuple(saved)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
