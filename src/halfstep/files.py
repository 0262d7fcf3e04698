"""Small files, written whole or not at all, and never a pickle."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_JSON = 16 * 2**20
"""A JSON file that we wrote is never near this; a larger one is not ours."""


def write_json(path: Path, content: Any) -> None:
    """Replace `path` by `content` as JSON."""
    write_text(path, json.dumps(content, indent=1, sort_keys=True))


def write_text(path: Path, content: str) -> None:
    """Replace `path` by `content`."""
    with replacing(path) as draft:
        draft.write_text(content, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path`, to be written inside; afterwards it is `path`, and a reader sees the old or the new one.

    An error inside leaves the old one. What was replaced is on the disk, and not only in its cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        flush(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """What a file holds, or the names in a folder, are on the disk, and not only in its cache."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any | None:
    """The content of a JSON file, or None where there is none or it cannot be read as JSON."""
    try:
        # Without blocking: a pipe in the file's place would wait for ever for somebody to write.
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_JSON:
                return None
            return json.loads(file.read(LARGEST_JSON).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def strict_json(text: bytes | str) -> Any:
    """JSON with every key once and no NaN in it, or ValueError: for files that somebody else may have touched."""
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("too many levels") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that is there twice")
    return found


def _finite(word: str) -> float:
    """A number that is too large for a float would become an infinity in silence."""
    return float(word) if math.isfinite(float(word)) else _no_number(word)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word[:40]} is no number")


def cache_folder() -> Path:
    """Where measurements are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "halfstep"
