"""Fingerprint the data of a run, small enough for a checkpoint: a resume on other data is another run.

Names, sizes and contents count; times and the location of the set do not. Of a large set, contents are sampled.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from halfstep.data.dataset import Source, complete_source
from halfstep.data.file_state import compute_block_digest, list_block_offsets
from halfstep.data.indexed import find_shards
from halfstep.errors import StateMismatch
from halfstep.numbers import format_counted_noun

if TYPE_CHECKING:
    from halfstep.data.shard_index import ShardIndex

MOST_WHOLE_BYTES = 2**30
"""Bytes above which the contents of a source are sampled: every name and size, and parts of some files."""
SAMPLED_FILES = 256
"""Files of which a few blocks are read: at most 1 GiB in all."""
MOST_ROWS, MOST_ROW_TEXT = 20_000, 2 * 2**20
"""Files or characters above which only groups are stored: a checkpoint's JSON must stay small."""
GROUPS = 256
MOST_KEYS = 1_000_000
UNREADABLE, NOT_READ = "unreadable", "-"
_VERSION = 1
_ROW = re.compile(rf"([0-9a-f]{{16}}|{UNREADABLE}|{NOT_READ}) ([0-9]{{1,18}}) (.*)", re.DOTALL)
"""A row as a checkpoint has it; a number of more digits is no file size."""
_NO_OTHER_FIELDS = ConfigDict(extra="forbid")
Digest = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{16}$")]
Count = Annotated[int, Field(strict=True, ge=0)]


class FilePrint(NamedTuple):
    """A file: its name below the root, its size and 16 hex digits of its content; or a sample without a file."""

    key: str
    size: int
    content: str


def _parse_row(saved: object) -> FilePrint:
    found = _ROW.fullmatch(saved) if isinstance(saved, str) else None
    if found is None:
        raise ValueError(f"{saved!r} is not a row of a file")
    return FilePrint(found[3], int(found[2]), found[1])


@dataclass(frozen=True)
class SourcePrint:
    """The fingerprint of one source; pydantic checks every field of a saved one."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHER_FIELDS

    samples: Count
    order: Digest
    """A digest of the samples' names by number, or of which samples of an index: the order is an order of numbers."""
    of: Literal["file", "sample", "shard"]
    """The kind of the rows; samples, where the source names no files, and shards, where it has an index."""
    count: Count
    size: Count
    whole: Annotated[bool, Field(strict=True)]
    """Whether every file was read whole."""
    digest: Digest
    """A digest of all groups, and so of all rows; of shards, the seal of their index."""
    rows: tuple[Annotated[FilePrint, PlainValidator(_parse_row)], ...] | None
    groups: Annotated[tuple[Digest, ...], Field(min_length=GROUPS, max_length=GROUPS)] | None
    """A digest for each group of rows, by the hash of their names; only where there are too many rows to store."""

    def by_group(self) -> tuple[str, ...]:
        """Return a digest for each group."""
        return _compute_group_digests(self.rows) if self.rows is not None else self.groups or ()

    def check_sums(self) -> None:
        """Raise ValueError if the count, the size or the digest is not that of the rows or groups."""
        if (self.rows is None) == (self.groups is None) and (self.of != "shard" or self.groups is not None):
            raise ValueError("both or none of rows and groups")
        if self.rows is not None and (len(self.rows), sum(row.size for row in self.rows)) != (self.count, self.size):
            raise ValueError("a count or size that differs from its rows")
        if self.of != "shard" and _compute_text_digest(self.by_group()) != self.digest:
            raise ValueError("a digest that differs from its rows or groups")


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of the sources of a run."""

    parts: tuple[SourcePrint, ...]
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
    """The fingerprinted sources, if they are here: its samples are named where they differ. Not saved."""

    @property
    def whole(self) -> bool:
        """Return whether every file was read whole."""
        return all(part.whole for part in self.parts)

    @property
    def of_files(self) -> bool:
        """Return whether file contents were compared; sources without files are compared by sample names only."""
        return all(part.of != "sample" for part in self.parts)

    def as_dict(self) -> dict[str, object]:
        """Return plain data for a checkpoint."""
        parts = []
        for part in self.parts:
            rows = None if part.rows is None else [_format_row(row) for row in part.rows]
            plain = {"rows": rows, "groups": part.groups and list(part.groups)}
            parts.append(asdict(replace(part, rows=None)) | plain)
        return {"version": _VERSION, "parts": parts}

    @classmethod
    def from_dict(cls, saved: object) -> Fingerprint:
        """Return the fingerprint that `as_dict` gave; raise StateMismatch for anything else."""
        try:
            parts = TypeAdapter(_SavedFingerprint).validate_python(saved).parts
            for part in parts:
                part.check_sums()
            return cls(parts)
        except ValueError as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            why = f"{'.'.join(map(str, first['loc']))} {first['msg']}" if first else str(error)
            raise StateMismatch(
                f"a fingerprint of data that cannot be read: {why[:200]}",
                allowed=f"a fingerprint saved by this version of halfstep (version {_VERSION})",
                do="use another checkpoint, or resume with the version that saved it",
            ) from error


@dataclass(frozen=True)
class _SavedFingerprint:
    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHER_FIELDS

    version: Annotated[int, Field(strict=True, ge=_VERSION, le=_VERSION)]
    parts: tuple[SourcePrint, ...]


def fingerprint(*sources: Source) -> Fingerprint:
    """Return the fingerprint of these sources: the seal of an index, or else names, sizes and contents of files.

    Reads up to 1 GiB of each source without an index; a shared file is read once.
    """
    contents: dict[tuple[str, bool], str] = {}
    return Fingerprint(tuple(_fingerprint_source(complete_source(one), contents) for one in sources), sources)


def compute_file_fingerprint(*sources: Source) -> Fingerprint:
    """Return the fingerprint without the seals of indexes, as checkpoints of earlier versions have it."""
    contents: dict[tuple[str, bool], str] = {}
    return Fingerprint(tuple(_fingerprint_files(source, contents) for source in sources), sources)


def _fingerprint_source(source: Source, contents: dict[tuple[str, bool], str]) -> SourcePrint:
    shards = find_shards(source)
    return _fingerprint_files(source, contents) if shards is None else _fingerprint_index(source, shards.index)


def _fingerprint_index(source: Source, index: ShardIndex) -> SourcePrint:
    sizes = index.table["bytes"].tolist()
    rows = None
    if len(sizes) <= MOST_ROWS and sum(map(len, index.names)) <= MOST_ROW_TEXT // 2:
        contents = (index.content(shard)[:16] for shard in range(len(sizes)))
        rows = tuple(map(FilePrint, index.names, sizes, contents))
    return SourcePrint(
        samples=len(source),
        order=_compute_text_digest([source.chosen or ""]),
        of="shard",
        count=len(sizes),
        size=sum(sizes),
        whole=True,
        digest=index.seal[:16],
        rows=rows,
        groups=None,
    )


def _fingerprint_files(source: Source, contents: dict[tuple[str, bool], str]) -> SourcePrint:
    keys = _convert_to_relative(source.keys_of(range(min(len(source), MOST_KEYS))))
    order = _compute_text_digest(f"{len(key)}:{key}" for key in keys)
    # A shard is the file of all its samples, and counts once.
    found = dict.fromkeys((key, os.fspath(path)) for key, path in source.every_file())
    rows = [FilePrint(key, 0, NOT_READ) for key in keys]
    whole = True
    if found:
        rows, whole = _build_file_rows(list(found), contents)
    rows.sort()
    groups = _compute_group_digests(rows)
    few = len(rows) <= MOST_ROWS and sum(len(json.dumps(_format_row(row))) for row in rows) <= MOST_ROW_TEXT
    return SourcePrint(
        samples=len(source),
        order=order,
        of="file" if found else "sample",
        count=len(rows),
        size=sum(row.size for row in rows),
        whole=whole,
        digest=_compute_text_digest(groups),
        rows=tuple(rows) if few else None,
        groups=None if few else groups,
    )


def _build_file_rows(
    found: list[tuple[str, str]], contents: dict[tuple[str, bool], str]
) -> tuple[list[FilePrint], bool]:
    sizes = [_find_file_size(path) for _, path in found]
    whole = sum(size or 0 for size in sizes) <= MOST_WHOLE_BYTES
    read = {key for key, _ in found}
    if not whole:
        # By the hash of their names: evenly spaced files would all change with one added file.
        read = set(heapq.nsmallest(SAMPLED_FILES, read, key=lambda key: (_compute_text_digest([key]), key)))
    rows = []
    for (key, path), size in zip(found, sizes, strict=True):
        if size is None:
            rows.append(FilePrint(key, 0, UNREADABLE))
        elif key not in read:
            rows.append(FilePrint(key, size, NOT_READ))
        else:
            if (path, whole) not in contents:
                contents[path, whole] = _read_content_digest(path, list_block_offsets(size, whole))
            rows.append(FilePrint(key, size, contents[path, whole]))
    return rows, whole


def _find_file_size(path: str) -> int | None:
    """Return the size; None for anything but a regular file: reading a pipe would block forever."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_content_digest(path: str, starts: Iterable[int]) -> str:
    try:
        return compute_block_digest(path, starts)
    except OSError:  # training replaces an unreadable sample
        return UNREADABLE


def _convert_to_relative(keys: list[str]) -> list[str]:
    """Return absolute paths relative to their common folder, so that a source without keys may be moved too."""
    if not keys or not all(map(os.path.isabs, keys)):
        return keys
    try:
        root = os.path.commonpath({os.path.dirname(key) for key in keys})
    except ValueError:  # several drives on Windows
        return keys
    return [os.path.relpath(key, root).replace(os.sep, "/") for key in keys]


def _compute_group_digests(rows: Iterable[FilePrint]) -> tuple[str, ...]:
    """Return a digest for each group of sorted rows; the name of a row decides its group."""
    groups = [sha256() for _ in range(GROUPS)]
    for row in rows:
        # The length goes first: a name may contain anything, and two rows must not run together.
        content = f"{len(row.key)}:{row.key}{row.size} {row.content}\n"
        groups[int(_compute_text_digest([row.key]), 16) % GROUPS].update(content.encode("utf-8", "surrogatepass"))
    return tuple(group.hexdigest()[:16] for group in groups)


def _compute_text_digest(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass"))
    # 16 hex digits are 64 bits: enough to detect accidental changes.
    return digest.hexdigest()[:16]


def _format_row(row: FilePrint) -> str:
    return f"{row.content} {row.size} {row.key}"


# -- changes ----------------------------------------------------------------------------------------------------------
# Describe how data differs from its fingerprint.


MOST_LINES = 20
LONGEST_NAME = 120
_NAMES = ("train", "val")


def different(saved: Fingerprint, now: Fingerprint, names: Sequence[str] = _NAMES) -> list[str]:
    """Return a few lines on what changed; empty if the data is the same. `names` label several sources."""
    if len(saved.parts) != len(now.parts):
        return [f"{format_counted_noun(len(now.parts), 'source')} of samples, saved {len(saved.parts):,}"]
    indexed = [after.of == "shard" != before.of for before, after in zip(saved.parts, now.parts, strict=True)]
    if any(indexed) and now.sources:
        # Saved before there was an index.
        now = compute_file_fingerprint(*now.sources)
    lines = []
    for number, (before, after) in enumerate(zip(saved.parts, now.parts, strict=True)):
        name = names[number] if number < len(names) else f"source {number + 1}"
        start = f"{name}: " if len(now.parts) > 1 else ""
        lines += [start + line for line in _describe_source_changes(before, after)]
        if now.sources and before.of == after.of == "shard" and before.digest != after.digest:
            lines += [start + line for line in _describe_changed_samples(before, now.sources[number])]
    return lines[:MOST_LINES]


def _describe_changed_samples(saved: SourcePrint, source: Source) -> list[str]:
    """Return which samples changed, where the index that the run began with is still there."""
    if (shards := find_shards(source)) is None:
        return []
    from halfstep.data.shard_check import describe_sample_changes  # here, because folders need no shards
    from halfstep.data.shard_index import find_index_by_seal

    before = find_index_by_seal(saved.digest, sorted(shards.root.glob("*.index")))
    return [] if before is None else describe_sample_changes(before, shards)


def _describe_source_changes(saved: SourcePrint, now: SourcePrint) -> list[str]:
    if _build_identity_key(saved) == _build_identity_key(now):
        return []
    lines: list[str] = []
    if saved.of != now.of:
        lines.append(f"{now.of}s are compared, and {saved.of}s were saved")
    elif saved.rows is not None and now.rows is not None:
        lines += _describe_row_changes(saved, now)
    else:
        lines += _describe_group_changes(saved, now)
    if not lines and saved.samples != now.samples:
        lines.append(f"{format_counted_noun(now.samples, 'sample')}, saved {saved.samples:,}")
    elif not lines and saved.order != now.order:
        lines.append(f"the same {now.of}s, with other samples or in another order")
    return lines or [f"other data: {now.digest}, saved {saved.digest}"]


def _build_identity_key(part: SourcePrint) -> tuple[object, ...]:
    return part.samples, part.order, part.of, part.count, part.size, part.whole, part.digest


def _describe_row_changes(saved: SourcePrint, now: SourcePrint) -> list[str]:
    # A Counter, not a set: a user's source may give a name twice.
    gone = Counter(saved.rows) - Counter(now.rows)
    came = Counter(now.rows) - Counter(saved.rows)
    before, after = _map_rows_by_key(gone), _map_rows_by_key(came)
    both = [(before.pop(key), after.pop(key)) for key in sorted(before.keys() & after.keys())]
    changed = [pair for pair in both if _has_row_changed(*pair, saved.whole == now.whole)]
    renamed = _pop_renamed_files(before, after)
    return [
        *_describe_first_example(
            now.of,
            "renamed",
            [f"{_format_printable_name(old)} -> {_format_printable_name(new)}" for old, new in renamed],
        ),
        *_describe_first_example(now.of, "added", map(_format_printable_name, after)),
        *_describe_first_example(now.of, "removed", map(_format_printable_name, before)),
        *_describe_first_example(
            now.of,
            "changed",
            [f"{_format_printable_name(old.key)} ({_describe_change(old, new)})" for old, new in changed],
        ),
    ]


def _map_rows_by_key(rows: Iterable[FilePrint]) -> dict[str, FilePrint]:
    return {row.key: row for row in sorted(rows)}


def _has_row_changed(old: FilePrint, new: FilePrint, same_reading: bool) -> bool:
    """Return whether two rows differ; contents count only where both were read in the same way."""
    if old.size != new.size or UNREADABLE in (old.content, new.content):
        return True
    return same_reading and NOT_READ not in (old.content, new.content)


def _pop_renamed_files(before: dict[str, FilePrint], after: dict[str, FilePrint]) -> list[tuple[str, str]]:
    """Return files that appeared with the content of one that disappeared, and remove them from both."""
    gone: dict[tuple[int, str], list[str]] = {}
    for key, row in reversed(before.items()):
        if row.content not in (UNREADABLE, NOT_READ):
            gone.setdefault((row.size, row.content), []).append(key)
    pairs = []
    for key, row in list(after.items()):
        if old := gone.get((row.size, row.content)):
            pairs.append((old.pop(), key))
            del before[pairs[-1][0]], after[key]
    return pairs


def _describe_change(old: FilePrint, new: FilePrint) -> str:
    if UNREADABLE in (old.content, new.content):
        return "cannot be read now" if new.content == UNREADABLE else "could not be read before"
    if old.size != new.size:
        return f"{format_counted_noun(old.size, 'byte')} -> {format_counted_noun(new.size, 'byte')}"
    return "same size, other content"


def _describe_group_changes(saved: SourcePrint, now: SourcePrint) -> list[str]:
    """Return how many more or fewer files there are, and how many groups differ: there are too many files to name."""
    lines = []
    if saved.count != now.count:
        lines.append(f"{format_counted_noun(now.count, now.of)}, saved {saved.count:,}")
    if saved.size != now.size:
        lines.append(f"{format_counted_noun(now.size, 'byte')} in all, saved {saved.size:,}")
    groups = list(zip(saved.by_group(), now.by_group(), strict=saved.of != "shard"))
    others = sum(old != new for old, new in groups)
    if others and saved.whole == now.whole:
        each = f"of about {format_counted_noun(round(now.count / len(groups)), now.of)} each"
        lines.append(f"names, sizes or contents differ in {others} of {len(groups)} groups, {each}")
    return lines


def _describe_first_example(thing: str, what: str, examples: Iterable[str]) -> list[str]:
    listed = list(examples)
    if not listed:
        return []
    between = ":" if len(listed) == 1 else ", the first"
    return [f"{format_counted_noun(len(listed), thing)} {what}{between} {listed[0]}"]


def _format_printable_name(key: str) -> str:
    """Return a name that is safe to print and not too long."""
    safe = key if key.isprintable() else repr(key)
    return safe if len(safe) <= LONGEST_NAME else f"...{safe[3 - LONGEST_NAME :]}"
