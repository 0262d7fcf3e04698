"""Write small files atomically, and read JSON that is bounded in size; nothing here is a pickle."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

from halfstep.errors import FolderTaken, StorageFailed

T = TypeVar("T")
LARGEST_JSON = 16 * 2**20
"""Bytes. No JSON file that halfstep writes comes near this size, so a larger one is not ours."""
_DRAFT = re.compile(r"\.(?P<name>.+?)\.[0-9]+(\.[0-9a-f]{16})?")
"""The name of a draft, with the name of the file that it was to replace; those of earlier versions have no token."""


class FolderOwner(Protocol):
    """The claim of this process on a folder."""

    def check(self) -> None:
        """Raise FolderLost if the folder is no longer this process's own."""

    def covers(self, path: Path) -> bool:
        """Return whether `path` is the folder or below it."""


_owner_searches: list[Callable[[Path], FolderOwner | None]] = []


def register_owner_search(search: Callable[[Path], FolderOwner | None]) -> None:
    """Register the function that finds the claim on a folder; without one, this process has claimed none."""
    _owner_searches.append(search)


def _find_owner(path: Path) -> FolderOwner | None:
    return next((owner for search in _owner_searches if (owner := search(path)) is not None), None)


def check_ownership(path: Path) -> None:
    """Raise FolderLost where `path` is in a folder that this process had claimed, and that is no longer its own."""
    owner = _find_owner(path)
    if owner is not None:
        owner.check()


def write_json(path: Path, content: Any) -> None:
    """Replace `path` atomically by `content` as JSON."""
    write_text(path, json.dumps(content, indent=1, sort_keys=True))


def write_text(path: Path, content: str) -> None:
    """Replace `path` atomically by `content`."""
    with replace_file(path) as draft:
        draft.write_text(content, encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Replace `path` atomically by a table with a column for every key that a row has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a draft path in the same folder to write to; on success it replaces `path` atomically.

    Readers see either the old content or the new one. An error inside keeps the old one. The new content is flushed to
    the disk.
    """
    with replace_file_unflushed(path) as draft:
        yield draft
        # Before the rename: a file system may otherwise store the new name ahead of the data, and a power cut then
        # leaves an empty file.
        flush(draft)
    flush(path.parent)


@contextmanager
def replace_file_unflushed(path: Path) -> Iterator[Path]:
    """Do the same without a flush, for content that a power cut may take: there is a newer one in a moment."""
    create_parent_folder(path)
    # In the same folder, because os.replace is atomic only within one file system; with a token, because several
    # processes may write the same file, and in two containers with one volume both may be process 1. The process id is
    # for a person who looks at a leftover.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    try:
        yield draft
        check_ownership(path)  # once more: large weights take a while
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def replace_storage_errors(given: str, *, allowed: str, do: str) -> Iterator[None]:
    """Turn an OSError inside the block into `StorageFailed`; `given` says what failed, and the reason is added."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{given}: {error.strerror or error}", allowed=allowed, do=do) from None


@contextmanager
def create_folder_atomically(place: Path) -> Iterator[Path]:
    """Yield a draft next to a new folder, to write to; on success it becomes the folder, otherwise nothing remains."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        yield draft
        # mkdtemp's folders are private, and so are the files of safetensors.
        (plain := draft / ".plain").touch()
        mode = plain.stat().st_mode
        plain.unlink()
        for path in filter(Path.is_file, draft.rglob("*")):
            path.chmod(mode)
        draft.chmod(0o755)
        os.replace(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_file_free(file: Path, overwrite: bool, *, do: str, flag: str = "") -> None:
    """Raise `FolderTaken` for a file that exists, unless it may be overwritten; `flag` is the option for that."""
    if file.is_dir() or (file.exists() and not overwrite):
        more = f", or add {flag} to replace it" if flag and not file.is_dir() else ""
        raise FolderTaken(f"{file} already exists", allowed="a name that is free", do=f"{do}{more}")


def create_parent_folder(path: Path) -> None:
    """Create the folder of a file that is about to be written.

    In the folder of this process's run, raise FolderLost if it is no longer the run's own; never create it anew.
    """
    owner = _find_owner(path)
    if owner is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    owner.check()
    if owner.covers(path.parent.parent):
        path.parent.mkdir(exist_ok=True)


def find_draft_target(name: str) -> str | None:
    """Return the name of the file that a draft of this name was to replace; None if it is no draft's name."""
    found = _DRAFT.fullmatch(name)
    return found["name"] if found else None


def flush(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any | None:
    """Return the content of a JSON file, or None if it is missing, too large or not JSON."""
    try:
        # Non-blocking: if a named pipe stands in the file's place, opening it would wait forever for a writer.
        with open(path, "rb", opener=_open_nonblocking) as file:
            # Of the open file, not of the path, which could be replaced between the check and the read.
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_JSON:
                return None
            return json.loads(file.read(LARGEST_JSON).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def parse_known_fields(kind: type[T], content: object) -> T:
    """Return a dataclass whose fields all have defaults from JSON that another program may have written.

    A field that is missing, or whose value is of another type, keeps its default.
    """
    found = content if isinstance(content, dict) else {}
    types = _list_field_types(kind)  # type: ignore[arg-type]
    return kind(**{name: value for name, value in found.items() if type(value) in types.get(name, ())})


@cache
def _list_field_types(kind: type[object]) -> dict[str, tuple[type[object], ...]]:
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_strict_json(text: bytes | str) -> Any:
    """Parse JSON with unique keys and finite numbers; raise ValueError otherwise. For files that others may edit."""
    try:
        return json.loads(
            text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_number, parse_float=_parse_finite
        )
    except RecursionError:
        raise ValueError("too many levels") from None


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate key")
    return found


def _parse_finite(word: str) -> float:
    """Refuse a number too large for a float, which would silently become inf."""
    return float(word) if math.isfinite(float(word)) else _reject_number(word)


def _reject_number(word: str) -> Any:
    raise ValueError(f"{word[:40]} is no number")


def find_cache_folder() -> Path:
    """Return the folder where measurements are cached between runs; one that cannot be created where there is no home.

    A user id without a name has no home, as in many containers. Nothing is then cached, as on a read-only disk.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # "~" again where there is no home; Path.home() raises RuntimeError
    return Path(base or (os.path.join(home, ".cache") if home != "~" else os.devnull)) / "halfstep"
