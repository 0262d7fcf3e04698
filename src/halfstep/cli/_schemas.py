"""The JSON schema of every task, kept between calls: reading it from the tasks means waiting for torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from halfstep import cli
from halfstep.files import cache_folder, read_json, write_text


def task_schemas() -> dict[str, dict[str, Any]]:
    """By the name of the task."""
    kept = cache_folder() / f"schemas-{_digest()}.json"
    found = read_json(kept)
    if isinstance(found, dict):
        return found
    found = read_task_schemas()
    # A cache that cannot be written costs time, nothing else.
    with contextlib.suppress(OSError):
        for old in kept.parent.glob("schemas-*.json"):
            old.unlink(missing_ok=True)
        write_text(kept, json.dumps(found))
    return found


def read_task_schemas() -> dict[str, dict[str, Any]]:
    """From the tasks themselves."""
    from halfstep.tasks._folder import task_class, task_names
    from halfstep.train.recipe.explain import json_schema

    return {name: json_schema(task_class(name).schema) for name in task_names()}


def _digest() -> str:
    """Of everything that a schema can come from, so that what is kept is never older than the code."""
    root = Path(cli.__path__[0]).parent
    files = sorted([*root.glob("tasks/**/*.py"), *root.glob("train/recipe/*.py"), root / "train" / "task.py"])
    digest = hashlib.sha256(version("pydantic").encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    for point in sorted(entry_points(group="halfstep.tasks"), key=str):
        digest.update(f"{point} {point.dist and point.dist.version}".encode())
    return digest.hexdigest()[:24]
