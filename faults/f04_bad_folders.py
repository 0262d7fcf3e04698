"""Folders that a run cannot be kept in: said before the first step, and nothing is written anywhere else."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS

ID = "F04"
WHAT = "a folder that is read-only, leads elsewhere or is too small is refused before the first step"
TAKEN, STORAGE, UNSAFE = 73, 74, 77
LATEST = 5.0
SETTINGS: dict[str, Any] = {"train.steps": 6, "train.num_workers": 0}
WIDE = {**SETTINGS, "model.width": 20_000}
"""A checkpoint of about a megabyte."""
_CAPABILITIES, _DAC_OVERRIDE = 0x20080522, 1
"""The version of the calls, and the right that root has; from linux/capability.h."""
_NEW_MOUNTS, _NEW_USERS, _READ_ONLY = 0x00020000, 0x10000000, 1


@dataclass(frozen=True)
class Case:
    codes: tuple[int, ...]
    make: Callable[[Path], object]
    """Make the run's folder what it should not be."""
    before: Callable[[], None] | None = None
    settings: Any = None
    dir: str = ""
    """A `run.dir` that is not the folder itself, seen from it."""


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    slowest = 0.0
    with rig.scratch() as folder:
        folder.chmod(0o777)
        # The first process waits for the server to load torch.
        assert rig.run(folder / "good", SETTINGS) == 0, rig.said(folder / "good")
        for name, case in cases(folder).items():
            place = folder / name.replace(" ", "-") / "runs" / "here"
            trials[name], seconds = _refused(folder, place, case)
            slowest = max(slowest, seconds)
    return outcome(trials, f"refused after {slowest:.2f}s")


def _refused(folder: Path, place: Path, case: Case) -> tuple[str | None, float]:
    place.parent.mkdir(parents=True)
    place.parent.chmod(0o777)
    elsewhere = place.parent.parent / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    case.make(place)
    asked = Path(f"{place}{case.dir}")
    own = folder / f"{place.parent.parent.name}"
    before, began = _files(folder), time.monotonic()
    process = rig.start(own, {**(case.settings or SETTINGS), "run.dir": str(asked)}, before=case.before)
    code = rig.ended(process, rig.LONGEST)
    seconds = time.monotonic() - began
    made = _files(folder) - before - {f"{own}.yaml", f"{own}.err"}
    outside = {path for path in made if not path.startswith(f"{place}/") and path != str(place)}
    wrong = first_wrong(
        (f"exit code {code}: {rig.said(own)}", lambda: code in case.codes),
        (f"it is named: {rig.said(own)}", lambda: _last(asked) in rig.said(own)),
        (f"nothing is made elsewhere: {outside}", lambda: not outside),
        ("there was no step", lambda: not rig.last_step(place) and not (outside or _saved(place))),
        (f"after {seconds:.1f} s", lambda: seconds <= LATEST),
    )
    return wrong, seconds


def _saved(place: Path) -> bool:
    return (place / CHECKPOINTS).is_dir() and any((place / CHECKPOINTS).iterdir())


def _last(path: Path) -> str:
    """The end of a path, as far as a message would have it."""
    return path.name[:40]


def _files(folder: Path) -> set[str]:
    return {str(Path(root) / name) for root, folders, files in os.walk(folder) for name in (*folders, *files)}


# -- cases -----------------------------------------------------------------------------------------------------------


def cases(folder: Path) -> dict[str, Case]:
    def there(name: str) -> str:
        return str(folder / name.replace(" ", "-") / "runs" / "here")

    found = {
        "read-only": Case((TAKEN,), _read_only, without_override),
        "in a read-only folder": Case((TAKEN,), lambda path: path.parent.chmod(0o555), without_override),
        "a file": Case((TAKEN,), lambda path: path.write_text("x")),
        "below a file": Case((TAKEN,), lambda path: path.write_text("x"), dir="/below"),
        "a device": Case((TAKEN,), lambda path: path.symlink_to("/dev/null")),
        "a link to nothing": Case((TAKEN,), lambda path: path.symlink_to(path.parent / "nothing")),
        "files of others": Case((TAKEN,), lambda path: (path.mkdir(), (path / "thesis.tex").write_text("x"))),
        "a name too long": Case((TAKEN,), lambda path: None, dir="x" * 300),
        "out by its name": Case((UNSAFE,), lambda path: path.mkdir(), dir="/../../x"),
        "checkpoints elsewhere": Case((TAKEN, UNSAFE), lambda path: _linked(path, CHECKPOINTS)),
        "a journal elsewhere": Case((TAKEN, UNSAFE), lambda path: _linked(path, "journal.jsonl")),
        "a lock elsewhere": Case((TAKEN, UNSAFE), lambda path: _linked(path, ".lock")),
    }
    if can_mount():
        small, full, fixed = there("too small a disk"), there("no more files"), there("a read-only disk")
        found["too small a disk"] = Case((STORAGE,), lambda path: path.mkdir(), Mounted(small, "size=512k"), WIDE)
        found["no more files"] = Case((TAKEN, STORAGE), lambda path: path.mkdir(), Mounted(full, "nr_inodes=3"))
        found["a read-only disk"] = Case((TAKEN,), lambda path: path.mkdir(), Mounted(fixed, "", _READ_ONLY))
    return found


def _read_only(path: Path) -> None:
    path.mkdir()
    path.chmod(0o555)


def _linked(path: Path, name: str) -> None:
    """A run's folder with a recipe, as if it had begun, in which one thing lies elsewhere."""
    path.mkdir()
    target = path.parent.parent / "elsewhere" / "target"
    target.mkdir() if name == CHECKPOINTS else target.write_text("")
    (path / name).symlink_to(target)
    if name != ".lock":
        (path / "recipe.yaml").write_text("task: tiny\n")


def without_override() -> None:
    """Give up root's right to write where permissions do not allow it; another user has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable ones, twice 32 bits of each
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    sets[0] &= ~(1 << _DAC_OVERRIDE)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


@dataclass(frozen=True)
class Mounted:
    """A disk of its own at this folder, in this process only."""

    path: str
    options: str
    flags: int = 0

    def __call__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        users = 0 if os.geteuid() == 0 else _NEW_USERS
        if libc.unshare(_NEW_MOUNTS | users) or libc.mount(
            b"none", self.path.encode(), b"tmpfs", self.flags, self.options.encode()
        ):
            raise OSError(ctypes.get_errno(), "no disk of its own")


def can_mount() -> bool:
    """Whether a process of this user may have a disk of its own; tried in another process."""
    child = os.fork()
    if child == 0:
        try:
            Mounted("/tmp", "size=64k")()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
