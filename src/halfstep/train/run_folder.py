"""Create or reopen the folder of a run, and lock it. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.errors import (
    RUN_FINISHED,
    BadData,
    FolderTaken,
    HalfstepError,
    StateMismatch,
    Unsafe,
    WrongUse,
    advise_adding_option,
    format_option,
)
from halfstep.files import check_ownership, find_draft_target, read_json, write_text
from halfstep.journal.jsonl import is_earlier_part
from halfstep.ownership import LOCK, FolderOwnership, read_holder
from halfstep.peers import RecordedProcess, is_process_alive
from halfstep.recipe.changes import (
    BATCH,
    EXTEND,
    EXTENSIONS,
    LENGTH,
    PLACES,
    REWARM,
    Change,
    SavedRun,
    build_recipe_changed_error,
    drop_keys,
    extend_recipe,
    format_change_list,
    format_length,
    is_longer,
    list_differences,
    list_relevant_changes,
    replace_extensions,
    suggest_longer_run,
)
from halfstep.recipe.changes import RECIPE as RECIPE_CHANGE
from halfstep.recipe.sources import read_recipe_bytes
from halfstep.recipe.strict_yaml import dump_recipe_yaml, parse_yaml
from halfstep.status_files import (
    RUNNING,
    WRITES,
    RankStatusRecord,
    name_status_file,
    parse_status_rank,
    parse_timestamp,
    read_status,
)
from halfstep.status_line import Now, ignore_status

TRIES = 5
HOLDER_WAIT = 0.5
"""The seconds that a holder has to write its text after it got the lock; on a loaded machine it may lose the CPU."""
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Error numbers of a lock that another process holds."""
"""The status file of rank 0, the process that holds the lock."""
WATCHED, HEARTBEATS, LONGEST_WATCH = 15.0, 3, 300.0
"""Seconds and heartbeats for which the status of a run on another host is watched, whichever is more; and the most."""


class FolderLock(FolderOwnership):
    """An exclusive lock on a folder, held until `release` or the end of the process."""

    def release(self) -> None:
        """Release the lock. The file stays: a removed one could be locked twice, as the old and as a new file."""
        with _changing:
            _held.discard(self)
            is_own = not self._is_changed()
            with self._using:
                if self._descriptor is not None and is_own:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._descriptor, 0)
                if self._descriptor is not None:
                    # Closing alone is not enough: a child that is being forked holds the descriptor for a moment.
                    _import_fcntl().flock(self._descriptor, _import_fcntl().LOCK_UN)
            super().release()

    def is_of(self, descriptor: int) -> bool:
        """Return whether this is a lock of the file that is open as `descriptor`."""
        with self._using:
            mine = None if self._descriptor is None else os.fstat(self._descriptor)
        return mine is not None and os.path.samestat(mine, os.fstat(descriptor))

    def _is_changed(self) -> bool:
        """Return whether another launch has written to the file: its text is left alone."""
        try:
            return self._loss() is not None
        except OSError:
            return True


def lock_folder(folder: Path, now: Now = ignore_status) -> FolderLock:
    """Return the lock of an existing folder; raise FolderTaken with the holder where another process has it.

    A file system may grant a lock to every host, or to everyone: a run that is seen to be alive has the folder too.
    A run of another host is watched for some seconds before its folder is taken; `now` receives that.
    """
    path = folder / LOCK
    _import_fcntl()
    try:
        elsewhere = find_run_elsewhere(folder)
        if elsewhere is not None:
            _watch_heartbeat(folder, elsewhere, now)
        with _changing:
            taken = _take_folder_lock(path)
            _held.add(taken)
            return taken
    except OSError as error:
        raise FolderTaken(
            f"{folder} cannot be locked: {error.strerror or error}",
            allowed="a writable folder on a file system with locks",
            do="give run.dir=PATH, a writable folder",
        ) from None


def _take_folder_lock(path: Path) -> FolderLock:
    for _ in range(TRIES):
        # O_NOFOLLOW: a link in the folder must not make the run lock, and write to, another file.
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{LOCK} is not a file")
            _lock_descriptor(path.parent, descriptor)
            # The folder may have been cleared since the open: the locked file would then have no name.
            if _is_still_locked_file(path, descriptor):
                _refuse_running_here(path.parent, descriptor)
                token = secrets.token_hex(8)
                text = json.dumps(asdict(RecordedProcess.own(token))).encode() + b"\n"
                return FolderLock(path.parent, descriptor, token, is_signed=_write_lock_text(descriptor, text))
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EBUSY, f"{LOCK} is removed again and again")


def _lock_descriptor(folder: Path, descriptor: int) -> None:
    try:
        _import_fcntl().flock(descriptor, _import_fcntl().LOCK_EX | _import_fcntl().LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise _in_use_error(folder, _wait_for_holder(descriptor)) from None
        raise


def _is_still_locked_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_lock_text(descriptor: int, text: bytes) -> bool:
    """Replace the text of a lock file; return whether the disk took it: a lock holds without its text."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        os.fsync(descriptor)  # for the ranks of other hosts, which read the token
    except OSError:
        return False
    return True


def _in_use_error(folder: Path, holder: RecordedProcess | None) -> FolderTaken:
    who, stop = str(holder or "another process"), ""
    if holder is not None and holder.is_here and holder.pid == os.getpid():
        who = f"this process (another run in it, since {holder.since})"
    elif holder is not None:
        stop = f"stop it (kill {holder.pid}{'' if holder.is_here else f' on {holder.host}'}), "
    return FolderTaken(
        f"{folder} is in use by {who}",
        allowed="one process per folder",
        do=f"wait for it, {stop}or {_suggest_other_folder()}",
    )


def _wait_for_holder(descriptor: int) -> RecordedProcess | None:
    until = time.monotonic() + HOLDER_WAIT
    while (holder := read_holder(descriptor)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return holder


def _import_fcntl() -> ModuleType:
    try:
        import fcntl
    except ImportError:
        raise WrongUse(
            "this system has no flock: two runs could write to one folder, and training cannot prevent it",
            allowed="Linux or macOS",
            do="train in WSL, or in a container",
        ) from None
    return fcntl


_held: set[FolderLock] = set()
_changing = threading.RLock()
"""Held while a lock is taken or released, so that no fork happens between opening a descriptor and recording it."""


def _drop_locks_in_child() -> None:
    """Drop the locks in a forked child, such as a data worker; `ownership` closes their descriptors there."""
    _held.clear()
    _changing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_drop_locks_in_child
    )


def find_run_elsewhere(folder: Path) -> RankStatusRecord | None:
    """Return the status of rank 0 if it says that the run is running on another host."""
    status = _read_running_status(folder)
    holder = status.holder if status else None
    return status if holder is not None and not holder.is_here else None


def _read_running_status(folder: Path) -> RankStatusRecord | None:
    status = read_status(folder, 0)
    return status if status is not None and status.state == RUNNING else None


def _watch_heartbeat(folder: Path, before: RankStatusRecord, now_does: Now) -> None:
    """Raise FolderTaken if the heartbeat of a run on another host moves; no clocks are compared."""
    seconds = _compute_watch_seconds(before)
    now_does(f"watching for {seconds:.0f} s whether {before.holder} still runs")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.25)
        now = find_run_elsewhere(folder)
        if now is None and not (folder / name_status_file(0)).exists():
            continue  # a file system without atomic renames
        if now is None:
            return
        if _build_heartbeat_key(now) != _build_heartbeat_key(before):
            raise _in_use_error(folder, now.holder)


def _build_heartbeat_key(status: RankStatusRecord) -> tuple[object, ...]:
    # Files of earlier versions have no `beat`: their time of writing changes even if the clock is wrong.
    return status.launch, status.beat, status.time, status.step, status.phase


def _compute_watch_seconds(status: RankStatusRecord) -> float:
    return min(max(WATCHED, HEARTBEATS * max(status.world or 1, 1) / WRITES), LONGEST_WATCH)


def _refuse_running_here(folder: Path, descriptor: int) -> None:
    """Raise FolderTaken if a process of this host has this lock, or this run, open."""
    status = _read_running_status(folder)
    for holder in (read_holder(descriptor), status.holder if status else None):
        if holder is None or not holder.is_here:
            continue
        if holder.pid == os.getpid():
            is_running = any(one.is_of(descriptor) for one in _held)
        else:
            is_running = is_process_alive(holder.pid, parse_timestamp(holder.since)) and _has_open(
                holder.pid, [os.fstat(descriptor), *_stat_journal(folder)]
            )
        if is_running:
            raise _in_use_error(folder, holder)


def _stat_journal(folder: Path) -> list[os.stat_result]:
    with contextlib.suppress(OSError):
        return [os.stat(folder / "journal.jsonl", follow_symlinks=False)]
    return []


def _has_open(pid: int, files: Collection[os.stat_result]) -> bool:
    """Return whether a process has one of these files open; True if that is unknown.

    The status in a copied folder names the process of the original, which has nothing to do with the copy.
    """
    place = Path(f"/proc/{pid}/fd")
    try:
        descriptors = list(place.iterdir())
    except OSError:
        return True
    for one in descriptors:
        with contextlib.suppress(OSError):
            found = one.stat()
            if any(os.path.samestat(found, file) for file in files):
                return True
    return False


RECIPE = "recipe.yaml"
RESULT = "result.json"
"""The file that a finished run writes last."""
RESTORING = ".restoring"
"""The folder into which a run is downloaded from an object store; a folder with it is not restored yet."""
FILES = (RECIPE, "journal.jsonl", "train.log")
FOLDERS = (CHECKPOINTS, "pictures", "tensorboard", "failed_steps", "stacks", "wandb")
"""Folders that a run adds to; other files are replaced."""
MOST_RUNS = 10_000

State = Literal["new", "unfinished"]
NEW: State = "new"
UNFINISHED: State = "unfinished"


def find_recipe_file(folder: Path) -> Path:
    """Return the path of the recipe in a run's folder; raise BadData if there is no run."""
    if not (folder / RECIPE).is_file():
        raise BadData(
            f"{folder} contains no run" if folder.is_dir() else f"there is no folder {folder}",
            allowed=f"the folder of a run, with its {RECIPE}",
            do="give the folder that `halfstep train` named, such as runs/segmentation_tiny",
        )
    return folder / RECIPE


def choose_run_dir(recipe: Any, label: str) -> Path:
    """Return the folder that a recipe names, or else the one of its label."""
    return Path(recipe.run.dir or Path("runs", label))


@dataclass(frozen=True)
class RunFolder:
    """A locked folder of a run, and its contents."""

    path: Path
    state: State
    recipe: Any
    """The recipe as written in the folder, with `run.dir` resolved."""
    lock: FolderLock
    changed: list[Change] = field(default_factory=list)
    """Accepted settings that differ from those the run began with."""
    result: Mapping[str, object] | None = None
    """The result of a finished run that is extended."""


def open_run(
    recipe: Any,
    label: str,
    new: bool = False,
    *,
    drawn: Collection[str] = (),
    accepted: Collection[str] = (),
    now: Now = ignore_status,
    fill: Callable[[Path], bool] = lambda path: False,
) -> RunFolder:
    """Create the run's folder and write the recipe, or open an unfinished run of this recipe.

    With `new`, use the first free `NAME`, `NAME-2`, ...; of several processes, exactly one gets each folder. Keys in
    `drawn` had no explicit value: the run keeps its own. With `EXTEND` in `accepted`, a finished run continues up to
    the recipe's length. `fill` may bring an earlier run into the locked folder, unless it is `new`, and returns whether
    it did; a run of another recipe is removed again. Raises FolderTaken, StateMismatch or Unsafe if the folder cannot
    be used.
    """
    wanted = choose_run_dir(recipe, label)
    try:
        if EXTEND in accepted and _read_folder_recipe(wanted) is None:
            raise FolderTaken(
                f"{format_option('extend')}, and there is no run in {wanted}",
                allowed="an existing run; run.dir=FOLDER names another one",
                do=f"remove {format_option('extend')} to start it",
            )
        path = _create_free_folder(wanted) if new else _make_folder(wanted)
        if not _is_restoring(path, recipe):
            _refuse_foreign(path)
        held = lock_folder(path, now)
        try:
            if new or not fill(path):
                return _open_locked(path, recipe, drawn, accepted, held)
            try:
                return _open_locked(path, recipe, drawn, accepted, held, recipe.checkpoint.remote)
            except StateMismatch as error:
                for entry in [one for one in path.iterdir() if not _is_leftover(one)]:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                raise StateMismatch(
                    error.given,
                    allowed="one run for each checkpoint.remote",
                    do=(
                        f"give another checkpoint.remote, or {advise_adding_option('accept_recipe_change')} to "
                        "continue that run"
                    ),
                    id=error.id,
                ) from None
        except BaseException:
            held.release()
            raise
    except OSError as error:
        raise _cannot_create_error(wanted, error) from None


def check_run(recipe: Any, label: str, *, drawn: Collection[str] = (), accepted: Collection[str] = ()) -> State:
    """Raise what `open_run` would raise, without changing a run; for commands that have yet to import torch."""
    path = choose_run_dir(recipe, label)
    try:
        if not path.exists():
            # Raises OSError for a path that is too long, with the longest name in a run's folder.
            (path / CHECKPOINTS / ("x" * 64) / ("x" * 64)).exists()
            return NEW
        if not _is_restoring(_make_folder(path), recipe):
            _refuse_foreign(path)
        if _read_folder_recipe(path) is None:
            return NEW
        if find_run_elsewhere(path) is not None:
            return UNFINISHED  # `open_run` watches that host first; until then nothing is written, not even the lock
        held = lock_folder(path)
        try:
            return _open_locked(path, recipe, drawn, accepted, held).state
        finally:
            held.release()
    except OSError as error:
        raise _cannot_create_error(path, error) from None


def _open_locked(
    path: Path,
    recipe: Any,
    drawn: Collection[str],
    accepted: Collection[str],
    held: FolderLock,
    place: str | None = None,
) -> RunFolder:
    """Return the run in a locked folder; `place` is where it was restored from."""
    placed = _replace_setting(recipe, "run.dir", str(path))
    _refuse_foreign(path)
    _refuse_links(path)
    written = _read_folder_recipe(path)
    if written is None:
        # A launch that was killed while it wrote the recipe leaves this file and nothing else.
        check_ownership(path)
        for draft in filter(_is_draft, path.iterdir()):
            draft.unlink()
        write_text(path / RECIPE, dump_recipe_yaml(placed))
        return RunFolder(path, NEW, placed, held)
    result = read_json(path / RESULT)
    saved = list_generations(path / CHECKPOINTS)
    known = result if isinstance(result, dict) or result is None else {}
    before = SavedRun(written, known, saved[0].attempt if saved else 0)
    own = {EXTENSIONS} if recipe.schedule.extensions in ([], before.extensions) else set()
    changed = list_relevant_changes(written, recipe, ignore={"run.dir", *own, *drawn})
    if before.result is not None and EXTEND not in accepted:
        raise _finished_error(path, changed, recipe, before)
    # The data itself is compared when it is read, and the samples of a step with those of the checkpoint's ranks.
    changed = drop_keys(changed, (*PLACES, *BATCH))
    unexplained = drop_keys(changed, LENGTH) if EXTEND in accepted else changed
    if unexplained and RECIPE_CHANGE not in accepted:
        raise build_recipe_changed_error(
            f"the {'unfinished ' if before.result is None else ''}run in {place or path}", unexplained
        )
    if EXTEND in accepted:
        placed = extend_recipe(placed, before, rewarm=REWARM in accepted)
    elif not placed.schedule.extensions:
        placed = replace_extensions(placed, before.extensions)
    for key in drawn:
        section, name = key.split(".")
        placed = _replace_setting(placed, key, written.get(section, {}).get(name))
    return RunFolder(path, UNFINISHED, placed, held, changed, before.result)


def remove_result(path: Path) -> None:
    """Remove the result of a run that is extended; the journal keeps it."""
    check_ownership(path / RESULT)
    (path / RESULT).unlink(missing_ok=True)


def write_run_recipe(path: Path, recipe: Any) -> None:
    """Write `recipe` as the recipe of the run in `path` from now on."""
    text = dump_recipe_yaml(recipe)
    # Most often it is what `open_run` has just written; a file with the same content in another form stays.
    with contextlib.suppress(HalfstepError):
        if read_recipe_bytes(path / RECIPE) == text.encode():
            return
    if list_differences(_read_folder_recipe(path) or {}, recipe):
        write_text(path / RECIPE, text)


def is_finished(path: Path) -> bool:
    """Return whether the run in this folder is finished."""
    return read_json(path / RESULT) is not None


def _make_folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir() and path.exists():
        raise FolderTaken(f"{path} is a file", allowed="a folder that is absent or empty", do="give run.dir=...")
    path.mkdir(exist_ok=True)
    return path


def _create_free_folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST_RUNS):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            # mkdir is atomic: of two processes, one fails and tries the next name.
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise FolderTaken(
        f"{path} and {MOST_RUNS:,} more", allowed="a free name", do="free some space, or give run.dir=..."
    )


def _refuse_foreign(path: Path) -> None:
    """Raise FolderTaken for a folder with foreign files; not even a lock is created in it."""
    if _read_folder_recipe(path) is None and not all(_is_leftover(entry) for entry in path.iterdir()):
        raise FolderTaken(
            f"{path} contains files, but no readable {RECIPE}",
            allowed="an absent or empty folder",
            do=_suggest_other_folder(),
        )


def _is_restoring(path: Path, recipe: Any) -> bool:
    """Return whether the files in a folder are left from a restore that was killed; the next one removes them."""
    return recipe.checkpoint.remote is not None and (path / RESTORING).is_dir()


def _refuse_links(path: Path) -> None:
    """Raise Unsafe for links: a run appends to, truncates and deletes these files, which must be its own."""
    files = [*FILES, *(entry.name for entry in path.iterdir() if is_earlier_part(entry.name))]
    kinds = [(name, stat.S_ISREG, "file") for name in files] + [(name, stat.S_ISDIR, "folder") for name in FOLDERS]
    for name, belongs, kind in kinds:
        try:
            mode = (path / name).lstat().st_mode
        except FileNotFoundError:
            continue
        if not belongs(mode):
            raise Unsafe(
                f"{path / name} is {'a link' if stat.S_ISLNK(mode) else f'no {kind}'}, and the run would write into it",
                allowed=f"a {kind} of the run's own",
                do=f"find out what created it, and move it away; or {_suggest_other_folder()}",
            )


def _is_leftover(entry: Path) -> bool:
    """Return whether `entry` is a file of a run that failed to start: another rank may write while rank 0 clears up."""
    return entry.name == LOCK or _is_draft(entry) or parse_status_rank(entry.name) is not None


def _is_draft(entry: Path) -> bool:
    """Return whether `entry` is left from writing a recipe; see `files.replacing`."""
    return find_draft_target(entry.name) == RECIPE and entry.is_file() and not entry.is_symlink()


def _replace_setting(recipe: Any, key: str, value: Any) -> Any:
    section, name = key.split(".")
    changed = getattr(recipe, section).model_copy(update={name: value})
    return recipe.model_copy(update={section: changed})


def _finished_error(path: Path, changed: list[Change], recipe: Any, before: SavedRun) -> HalfstepError:
    """Return the error for a finished run, by what the user most likely meant."""
    asked = recipe.train.epochs, recipe.train.steps
    if changed and not drop_keys(changed, PLACES):
        return FolderTaken(
            format_change_list(f"{path} contains a finished run on another data folder:", changed),
            allowed="one run per folder",
            do=f"give its original data folder, or {_suggest_other_folder()}, to train on this one",
        )
    if changed and asked != before.length and not drop_keys(changed, LENGTH):
        return _other_length_error(path, asked, before)
    if changed:
        return FolderTaken(
            format_change_list(f"{path} contains a finished run of another recipe:", changed),
            allowed="one run per folder; a finished one continues only with an extension",
            do=f"{_suggest_other_folder()}; `halfstep train {path / RECIPE}` has the settings of the existing run",
        )
    return FolderTaken(
        f"{path} contains this run, finished",
        allowed="one run per folder",
        do=(
            f"halfstep evaluate {path}, or {suggest_longer_run(before)} to continue training, or "
            f"{_suggest_other_folder()}"
        ),
        id=RUN_FINISHED,
    )


def _other_length_error(path: Path, asked: tuple[int | None, int | None], before: SavedRun) -> FolderTaken:
    given = (
        f"{path} contains this run, finished after {format_length(before.length)}; {format_length(asked)} are requested"
    )
    if is_longer(asked, before.length) is False:
        return FolderTaken(given, allowed="one run per folder; a run cannot be shortened", do=_suggest_other_folder())
    extend = (
        f"{advise_adding_option('extend')} to continue to {format_length(asked)}, with {format_option('rewarm')} for "
        "a new warm-up and decay"
    )
    return FolderTaken(
        given,
        allowed="a finished run continues only with an extension",
        do=f"{extend}; or {_suggest_other_folder()}",
    )


def _suggest_other_folder() -> str:
    return f"{advise_adding_option('new')} for a new folder"


def _read_folder_recipe(path: Path) -> dict[str, Any] | None:
    file = path / RECIPE
    try:
        return parse_yaml(read_recipe_bytes(file), str(file))
    except HalfstepError:
        return None


def _cannot_create_error(path: Path, error: OSError) -> FolderTaken:
    return FolderTaken(
        f"{path} cannot be created or written to: {error.strerror or error}",
        allowed="a folder that this user can write to",
        do="give run.dir=PATH, a writable folder",
    )
