"""Small files, written whole or not at all, and never a pickle."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

LARGEST_JSON = 16 * 2**20
"""A JSON file that we wrote is never near this; a larger one is not ours."""


def write_json(path: Path, content: Any) -> None:
    """Replace `path` by `content`; a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any | None:
    """The content of a JSON file, or None where there is none or it cannot be read as JSON."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def cache_folder() -> Path:
    """Where measurements are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "halfstep"
