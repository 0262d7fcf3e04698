"""A part of the state that is not in a checkpoint, or that the code forgets to put back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults import on_two, rig
from faults.everything import SETTINGS, Everything, Launch
from faults.judged import Compared
from faults.outcome import Outcome
from faults.refit import refit
from halfstep.errors import HalfstepError
from halfstep.train.resume import find_checkpoint
from halfstep.train.state import COMPONENTS

ID = "F31"
WHAT = "each of the twelve parts of a checkpoint is required and restored: a resumed run has the same bits"
ENDS = {False: (6, 17), True: (1, 6, 17, 18, 29, 39)}
"""Steps after which the run is killed: in an epoch, at the end of one, before the first save."""
PLATEAU, COSINE = dict[str, Any](), {"schedule.name": "cosine"}
Settings = dict[str, Any]


def run(full: bool) -> Outcome:
    compared, two = Compared(), on_two.checks()
    compared.counted(two["two: other bits"])
    with rig.scratch() as folder:
        checks = {
            **dict(_absent(folder, full)),
            **dict(_equal(folder, full, compared)),
            **dict(_decided(folder)),
            **two,
        }
    wrong = [name for name, good in checks.items() if not good]
    return Outcome(len(checks) - len(wrong), len(checks), wrong[0] if wrong else str(compared))


def _launch(folder: Path, launch: Launch, settings: Settings = PLATEAU) -> int:
    return rig.run(folder, {**SETTINGS, **settings}, task=Everything, before=launch)


# -- a part that is not there -------------------------------------------------------------------------------------


def _absent(folder: Path, full: bool) -> Iterator[tuple[str, bool]]:
    """Through the whole command in the full form; the small one looks at the place where it is refused."""
    stump, refused = folder / "stump", _ends_refused if full else _is_refused
    assert _launch(stump, Launch(17)) == -9
    for name in COMPONENTS:
        yield f"without {name}", refused(stump, folder / f"no-{name}", _without(name), name)
    yield "with one more", refused(stump, folder / "more", lambda state: state.update(mood={}), "mood")


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(name)


def _is_refused(stump: Path, folder: Path, change: Callable[[dict[str, Any]], object], name: str) -> bool:
    shutil.copytree(stump, folder)
    refit(folder, change)
    try:
        find_checkpoint(folder)
    except HalfstepError as error:
        return error.exit_code == 79 and name in error.given.rpartition("/")[2]
    return False


def _ends_refused(stump: Path, folder: Path, change: Callable[[dict[str, Any]], object], name: str) -> bool:
    shutil.copytree(stump, folder)
    refit(folder, change)
    return _launch(folder, Launch()) == 79 and name in rig.said(folder).split("\n")[0].rpartition("/")[2]


# -- a part that is not put back ----------------------------------------------------------------------------------


def _equal(folder: Path, full: bool, compared: Compared) -> Iterator[tuple[str, bool]]:
    for number, settings in enumerate((PLATEAU, COSINE) if full else (PLATEAU,)):
        whole = folder / f"whole-{number}"
        assert _launch(whole, Launch(), settings) == 0
        for end in ENDS[full]:
            cut = folder / f"cut-{number}-{end}"
            assert _launch(cut, Launch(end), settings) == -9
            # What a second measurement would say must make no difference, once the first one is saved.
            again = Launch(workers=int(end >= SETTINGS["checkpoint.every_steps"]))
            good = _launch(cut, again, settings) == 0 and compared.counted(_same(cut, whole))
            yield f"killed at {end} of run {number}", good


def _same(one: Path, other: Path) -> bool:
    try:
        return rig.ending(one) == rig.ending(other)
    except AssertionError:
        return False


# -- parts that decide, and change no number by themselves --------------------------------------------------------


def _decided(folder: Path) -> Iterator[tuple[str, bool]]:
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "recipe": lambda state: state["recipe"]["optimizer"].update(lr=0.5),
        "precision": lambda state: state["precision"].update(islands=["4"]),
    }
    for name, change in changes.items():
        yield f"another {name}", _ends_refused(folder / "stump", folder / f"other-{name}", change, "")
