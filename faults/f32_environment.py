"""Clocks, places, languages and settings that are others when a run goes on."""

from __future__ import annotations

import locale
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import rig
from faults.judged import Compared
from faults.outcome import Outcome
from faults.refit import elsewhere, of_form
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.checkpoint.sealed import FORMAT
from halfstep.journal.jsonl import read_events
from halfstep.recipe.changes import SAFE
from halfstep.train.checkpointing import Checkpoints
from tests.support.digest import digest_of

ID = "F32"
WHAT = "settings outside the training change no bit of it, and training settings cannot change unnoticed"
YEAR = 365.25 * 86400
STEPS, EVERY = {False: 45, True: 150}, 3
BASE: dict[str, Any] = {"data.nan": [3], "data.unreadable": [5], "data.samples": 76}
"""Ten windows an epoch, of which the last takes four samples a second time."""


@dataclass(frozen=True)
class Around:
    """What is other than usual around a launch, and the step after which it is killed."""

    kill_at: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    clock: float = 0.0

    def __call__(self) -> None:
        os.environ.update(self.variables)
        time.tzset()
        for name in filter(None, [self.variables.get("LC_ALL")]):
            locale.setlocale(locale.LC_ALL, name)
        if self.folder is not None:
            os.chdir(self.folder)
        if self.clock:
            now, now_ns = time.time, time.time_ns
            time.time = lambda: now() + self.clock
            time.time_ns = lambda: now_ns() + int(self.clock * 1e9)
        if self.kill_at is not None:
            _killed_after(self.kill_at)


def _killed_after(attempt: int) -> None:
    """After a step, and after its save where it has one."""
    record_finished = Checkpoints.record_finished

    def ending(checkpoints: Checkpoints) -> None:
        if checkpoints._live.progress.attempts == attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        record_finished(checkpoints)

    Checkpoints.record_finished = ending  # type: ignore[method-assign]


Launch = tuple[Around, Mapping[str, Any]]
"""What is around it, and settings that are others."""


def run(full: bool) -> Outcome:
    steps, compared = STEPS[full], Compared()
    settings = {**BASE, "train.steps": steps}
    with rig.scratch() as folder:
        whole, stump = folder / "whole", folder / "stump"
        assert rig.run(whole, settings) == 0
        assert rig.run(stump, settings, before=Around(steps // 3)) == -9
        checks = dict(_perturbed(folder, settings, steps, compared))
        checks["PYTHONHASHSEED"] = _with_other_hashes(folder, settings, compared)
        checks["no seed"] = _without_seed(folder, settings, steps, compared)
        checks |= _drift(folder, settings, compared)
    wrong = [name for name, good in checks.items() if not good]
    return Outcome(len(checks) - len(wrong), len(checks), wrong[0] if wrong else str(compared))


def comes_to(folder: Path) -> tuple[Any, ...]:
    """Every loss, the weights, and the last state, but for settings that may differ."""
    end = rig.ending(folder)
    verdict, _ = find_newest_intact(folder / CHECKPOINTS)
    assert verdict is not None
    plain, tensors = read_rank_state(verdict.generation, 0)
    plain["position"].pop("journal_sizes")
    for key in SAFE:
        section, _, name = key.partition(".")
        (plain["recipe"].get(section, {}) if name else plain["recipe"]).pop(name or section, None)
    return end.losses, end.weights, digest_of(plain, tensors)


def _same(one: Path, other: Path) -> bool:
    try:
        return comes_to(one) == comes_to(other)
    except AssertionError:
        return False


# -- what must make no difference ---------------------------------------------------------------------------------


def _perturbed(folder: Path, settings: dict[str, Any], steps: int, compared: Compared) -> Iterator[tuple[str, bool]]:
    again = 2 * steps // 3
    other: dict[str, Any] = {"run.log_every": 4, "run.pictures": 1, "about": "another sentence"}
    other |= {"checkpoint.every_steps": 4, "checkpoint.keep": 3, "checkpoint.background": False}
    launches: dict[str, Sequence[Launch]] = {
        "TZ": [(Around(again, {"TZ": "Pacific/Kiritimati"}), {}), (Around(None, {"TZ": "America/Adak"}), {})],
        "locale": [(Around(None, {"LC_ALL": _other_locale(), "LANG": "tr_TR"}), {})],
        "another folder": [(Around(folder=str(folder)), {})],
        "num_workers": [(Around(again), {"train.num_workers": 1}), (Around(), {"train.num_workers": 2})],
        "the clock": [(Around(again, clock=YEAR), {}), (Around(clock=-YEAR), {})],
        "log and checkpoints": [(Around(), other)],
    }
    for name, each in launches.items():
        place = folder / name.replace(" ", "-")
        shutil.copytree(folder / "stump", place)
        codes = [_launched(place, settings, around, more) for around, more in each]
        yield (
            name,
            codes[-1] == 0
            and codes[:-1] == [-9] * (len(codes) - 1)
            and compared.counted(_same(place, folder / "whole")),
        )


def _launched(place: Path, settings: dict[str, Any], around: Around, more: Mapping[str, Any]) -> int:
    named = place if around.folder is None else Path(os.path.relpath(place, around.folder))
    return rig.run(named, {**settings, **more}, before=around)


def _other_locale() -> str:
    """One that writes numbers and letters otherwise, where the system has one."""
    for name in ("de_DE.UTF-8", "tr_TR.UTF-8", "C.UTF-8", "POSIX"):
        try:
            before = locale.setlocale(locale.LC_ALL)
            locale.setlocale(locale.LC_ALL, name)
            locale.setlocale(locale.LC_ALL, before)
        except locale.Error:
            continue
        return name
    return "C"


def _with_other_hashes(folder: Path, settings: dict[str, Any], compared: Compared) -> bool:
    """In an interpreter of its own: the order of sets is decided when it starts."""
    place = folder / "hashes"
    shutil.copytree(folder / "stump", place)
    code = f"from faults import child, mutants; child.run({str(place)!r}, {settings!r}, mutant=mutants.current())"
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    return ended.returncode == 0 and compared.counted(_same(place, folder / "whole"))


def _without_seed(folder: Path, settings: dict[str, Any], steps: int, compared: Compared) -> bool:
    """One is drawn when the run begins, and kept."""
    settings = {**settings, "train.seed": None}
    place, whole = folder / "no-seed", folder / "no-seed-whole"
    killed = rig.run(place, settings, before=Around(steps // 3))
    drawn = read_events(place / "journal.jsonl")[0]["recipe"]["train"]["seed"]
    codes = [killed, rig.run(place, settings), rig.run(whole, {**settings, "train.seed": drawn})]
    return codes == [-9, 0, 0] and compared.counted(_same(place, whole))


# -- what must be noticed -----------------------------------------------------------------------------------------


def _drift(folder: Path, settings: dict[str, Any], compared: Compared) -> Iterator[tuple[str, bool]]:
    refused: dict[str, dict[str, Any]] = {
        "lr": {"optimizer.lr": 0.02},
        "precision": {"precision": "bf16"},
        "batch_size": {"train.batch_size": 4},
    }
    for name, more in refused.items():
        place = _copy(folder, name)
        yield f"another {name}", rig.run(place, {**settings, **more}) == 79 and f"{name}:" in rig.said(place)
    place = _copy(folder, "budget")
    yield (
        "more bad samples",
        rig.run(place, {**settings, "data.bad_samples": 20}) == 0 and compared.counted(_same(place, folder / "whole")),
    )
    forms = {"an earlier": FORMAT - 1, "a later": FORMAT + 1}
    yield "another form", all(_refuses(_copy(folder, f"form-{n}"), n, whose, settings) for whose, n in forms.items())
    facts: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": lambda: {"torch": "1.0.0"},
        "threads": lambda: {"threads": 64},
    }
    for name, other in facts.items():
        place = _copy(folder, f"other-{name}")
        elsewhere(place, **other())
        yield f"other {name}", rig.run(place, settings) == 0 and _says_approximate(place, name)


def _refuses(place: Path, form: int, whose: str, settings: dict[str, Any]) -> bool:
    """By the name of the version, and without taking it for damaged."""
    of_form(place, form)
    before = list_generations(place / CHECKPOINTS)
    refused = rig.run(place, settings) == 79 and f"by {whose} halfstep" in rig.said(place)
    return refused and list_generations(place / CHECKPOINTS) == before


def _copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder / "stump", folder / name))


def _says_approximate(place: Path, name: str) -> bool:
    start = [event for event in read_events(place / "journal.jsonl") if event["event"] == "start"][-1]
    told = start["resumed"]
    because = [line for line in told["reasons"] if line.startswith(f"{name} was")]
    return not told["exact"] and len(because) == 1 and "APPROXIMATE" in (place / "train.log").read_text()
