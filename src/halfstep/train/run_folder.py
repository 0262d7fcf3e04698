"""The folder of a run: a new one, or one that says what is in it already. Imports no torch."""

from __future__ import annotations

import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from halfstep.errors import FolderTaken, HalfstepError, Unsafe
from halfstep.files import read_json, write_text
from halfstep.train.lock import LOCK, FolderLock, lock
from halfstep.train.recipe.changes import RECIPE as RECIPE_CHANGE
from halfstep.train.recipe.changes import but_for_places, changes, listed, recipe_changed
from halfstep.train.recipe.sources import read_bounded
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.recipe.written import different, to_yaml

RECIPE = "recipe.yaml"
RESULT = "result.json"
"""Written last, by a run that came to its end."""
FILES = (RECIPE, "journal.jsonl", "train.log")
FOLDERS = ("checkpoints", "pictures", "tensorboard", "trouble", "wandb")
"""Where a run writes into what is there already; other files it replaces."""
MOST_RUNS = 10_000
ANOTHER = "add --new for a folder of its own"

State = Literal["new", "unfinished"]
NEW: State = "new"
UNFINISHED: State = "unfinished"


@dataclass(frozen=True)
class RunFolder:
    """A folder that is this run's alone until the lock is released, and what was found there."""

    path: Path
    state: State
    recipe: Any
    """The recipe as it is written in the folder, with `run.dir` as it came out."""
    lock: FolderLock
    changed: list[str] = field(default_factory=list)
    """Settings that are others than those the run was begun with, and were accepted."""


def open_run(
    recipe: Any, label: str, new: bool = False, *, drawn: Collection[str] = (), accepted: Collection[str] = ()
) -> RunFolder:
    """Make the run's folder and write the recipe into it, or take up an unfinished run of this recipe.

    With `new`, the first free `NAME`, `NAME-2`, `NAME-3`, ... Of several processes that ask at once, exactly one gets a
    folder. Keys in `drawn` had no value of their own: the run keeps those that it was begun with.
    """
    wanted = Path(recipe.run.dir or Path("runs", label))
    try:
        path = _first_free(wanted) if new else _made(wanted)
        _refuse_foreign(path)
        held = lock(path)
        try:
            return _opened(path, recipe, drawn, accepted, held)
        except BaseException:
            held.release()
            raise
    except OSError as error:
        raise _cannot_create(wanted, error) from None


def _opened(path: Path, recipe: Any, drawn: Collection[str], accepted: Collection[str], held: FolderLock) -> RunFolder:
    placed = _with(recipe, "run.dir", str(path))
    _refuse_foreign(path)
    _refuse_links(path)
    written = _written(path)
    if written is None:
        for draft in filter(_is_draft, path.iterdir()):
            draft.unlink()
        write_text(path / RECIPE, to_yaml(placed))
        return RunFolder(path, NEW, placed, held)
    lines = changes(written, recipe, ignore={"run.dir", *drawn})
    if is_finished(path):
        raise _finished(path, lines)
    lines = but_for_places(lines)  # the data itself is compared when it is read
    if lines and RECIPE_CHANGE not in accepted:
        raise recipe_changed(f"the unfinished run in {path}", lines)
    for key in drawn:
        section, name = key.split(".")
        placed = _with(placed, key, written.get(section, {}).get(name))
    return RunFolder(path, UNFINISHED, placed, held, lines)


def keep_recipe(path: Path, recipe: Any) -> None:
    """From here on this is the recipe of the run in `path`."""
    if different(_written(path) or {}, recipe):
        write_text(path / RECIPE, to_yaml(recipe))


def is_finished(path: Path) -> bool:
    """Whether a run came to its end in this folder."""
    return read_json(path / RESULT) is not None


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir() and path.exists():
        raise FolderTaken(f"{path} is a file", allowed="a folder that is absent or empty", do="give run.dir=...")
    path.mkdir(exist_ok=True)
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


def _refuse_foreign(path: Path) -> None:
    """A folder with files that no run left is somebody's, and not even a lock is put into it."""
    if _written(path) is None and any(entry.name != LOCK and not _is_draft(entry) for entry in path.iterdir()):
        raise FolderTaken(
            f"{path} holds files, and no {RECIPE} that can be read", allowed="an absent or empty folder", do=ANOTHER
        )


def _refuse_links(path: Path) -> None:
    """What a run adds to, shortens or clears up must be its own: a link would have it done to somebody's files."""
    kinds = [(name, stat.S_ISREG, "file") for name in FILES] + [(name, stat.S_ISDIR, "folder") for name in FOLDERS]
    for name, belongs, kind in kinds:
        try:
            mode = (path / name).lstat().st_mode
        except FileNotFoundError:
            continue
        if not belongs(mode):
            raise Unsafe(
                f"{path / name} is {'a link' if stat.S_ISLNK(mode) else f'no {kind}'}, and the run would write into it",
                allowed=f"a {kind} of the run's own",
                do=f"look at what put it there, and move it away; or {ANOTHER}",
            )


def _is_draft(entry: Path) -> bool:
    """What a run leaves that was killed while its recipe was being written; see `files.replacing`."""
    name, _, number = entry.name.rpartition(".")
    return name == f".{RECIPE}" and number.isdigit() and entry.is_file() and not entry.is_symlink()


def _with(recipe: Any, key: str, value: Any) -> Any:
    section, name = key.split(".")
    changed = getattr(recipe, section).model_copy(update={name: value})
    return recipe.model_copy(update={section: changed})


def _finished(path: Path, lines: list[str]) -> FolderTaken:
    if lines:
        return FolderTaken(
            listed(f"{path} holds a finished run of another recipe:", lines),
            allowed="one run a folder; a finished one does not go on",
            do=ANOTHER,
        )
    return FolderTaken(
        f"{path} holds this run, finished", allowed="one run a folder", do=f"halfstep evaluate {path}, or {ANOTHER}"
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
