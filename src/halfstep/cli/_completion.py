"""What a shell offers after Tab: the recipes and folders of runs that fit what has been typed. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MOST = 1000
"""Entries of a folder that are looked at: a key press must not wait for a large one."""
RUNS = "runs"
"""The folder where `halfstep train` places runs."""


def complete_recipes(incomplete: str) -> list[str]:
    """Return the names of the recipes that start with the typed text, then files and folders that lead to others."""
    try:
        from halfstep.recipe.sources import list_recipe_names
    except ImportError:  # without the extra `train` there is nothing to run
        return []
    names = [name for name in list_recipe_names() if name.startswith(incomplete)]
    return names + [
        _format_completion(path)
        for path in _list_below(incomplete)
        if path.suffix in (".yaml", ".yml") or _is_folder(path)
    ]


def complete_run_folders(incomplete: str) -> list[str]:
    """Return the folders of runs that start with the typed text, or the folders on the way to one."""
    # Nothing typed yet: the runs themselves, not the folder that holds them.
    found = list(_list_below(incomplete or f"{RUNS}/")) or list(_list_below(incomplete))
    runs = [path for path in found if (path / "recipe.yaml").is_file()]
    return [str(path) for path in runs] or [_format_completion(path) for path in found if _is_folder(path)]


def _list_below(incomplete: str) -> Iterator[Path]:
    """Yield the entries of a folder whose names start with the typed text, without unprintable ones."""
    folder, _, name = incomplete.rpartition("/")
    place = Path(os.path.expanduser(f"{folder}/" if "/" in incomplete else "."))
    try:
        with os.scandir(place) as entries:
            found = sorted(entry.name for entry in islice(entries, MOST))
    except OSError:
        return
    for entry in found:
        if entry.startswith(name) and entry.isprintable() and (name or not entry.startswith(".")):
            yield place / entry if "/" in incomplete else Path(entry)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.endswith(".egg-info")


def _format_completion(path: Path) -> str:
    return f"{path}/" if path.is_dir() else str(path)
