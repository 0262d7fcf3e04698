"""The folder of a run: a new one, or one that says what is in it already. Imports no torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halfstep.errors import FolderTaken, HalfstepError
from halfstep.files import read_json, write_text
from halfstep.train.recipe.sources import read_bounded
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.recipe.written import different, to_yaml

RECIPE = "recipe.yaml"
RESULT = "result.json"
"""Written last, by a run that came to its end."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems say that know no hard links."""
MOST_LINES = 20
MOST_RUNS = 10_000

State = Literal["new"]


@dataclass(frozen=True)
class RunFolder:
    """A folder that this run may write to, and what it found there."""

    path: Path
    state: State
    recipe: Any
    """The recipe as it is written in the folder, with `run.dir` as it came out."""


def open_run(recipe: Any, label: str, new: bool = False, *, drawn: Collection[str] = ()) -> RunFolder:
    """Make the run's folder and write the recipe into it; with `new`, the first free `NAME`, `NAME-2`, `NAME-3`, ...

    Of several processes that ask at once, exactly one gets a folder. Keys in `drawn` had no value of their own: two
    launches that drew different seeds are the same recipe.
    """
    wanted = Path(recipe.run.dir or Path("runs", label))
    try:
        path = _first_free(wanted) if new else _claim(wanted)
    except OSError as error:
        raise _cannot_create(wanted, error) from None
    if path is None:
        raise _taken(wanted, recipe, drawn)
    placed = _with_folder(recipe, path)
    try:
        _write_once(path / RECIPE, to_yaml(placed))
    except FileExistsError:
        raise _taken(path, recipe, drawn) from None
    except OSError as error:
        raise _cannot_create(path, error) from None
    return RunFolder(path, "new", placed)


def is_finished(path: Path) -> bool:
    """Whether a run came to its end in this folder."""
    return read_json(path / RESULT) is not None


def _claim(path: Path) -> Path | None:
    """The folder, where it is absent or empty; None where it is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            return None
    return path


def _first_free(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST_RUNS):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise FolderTaken(f"{path} and {MOST_RUNS:,} more", allowed="a free name", do="clear up, or give run.dir=...")


def _write_once(path: Path, text: str) -> None:
    """The whole file at once, or FileExistsError where another process was first."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_text(draft, text)
        os.link(draft, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    finally:
        draft.unlink(missing_ok=True)


def _with_folder(recipe: Any, path: Path) -> Any:
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": str(path)})})


def _taken(path: Path, recipe: Any, drawn: Collection[str]) -> FolderTaken:
    another = "add --new for a folder of its own"
    if not path.is_dir():
        return FolderTaken(f"{path} is a file", allowed="a folder that is absent or empty", do="give run.dir=...")
    written = _written(path)
    if written is None:
        return FolderTaken(
            f"{path} holds files, and no {RECIPE} that can be read", allowed="an absent or empty folder", do=another
        )
    lines = different(written, recipe, ignore={"run.dir", *drawn})
    if lines:
        more = [f"    ... and {len(lines) - MOST_LINES + 1} more"] if len(lines) > MOST_LINES else []
        shown = [f"    {line}" for line in (lines[: MOST_LINES - 1] if more else lines)] + more
        return FolderTaken("\n".join([f"{path} holds a run of another recipe:", *shown]), do=another)
    if is_finished(path):
        return FolderTaken(
            f"{path} holds this run, finished", allowed="one run a folder", do=f"halfstep evaluate {path}, or {another}"
        )
    return FolderTaken(
        f"{path} holds this run, interrupted; it cannot be taken up again yet",
        allowed="one run a folder",
        do=f"{another}, or delete the folder to begin again",
    )


def _written(path: Path) -> dict[str, Any] | None:
    file = path / RECIPE
    try:
        return read_yaml(read_bounded(file), str(file))
    except HalfstepError:
        return None


def _cannot_create(path: Path, error: OSError) -> FolderTaken:
    return FolderTaken(
        f"{path} cannot be made or written to: {error.strerror or error}",
        allowed="a folder that this user can write to",
        do="give run.dir=PATH, a place of your own",
    )
