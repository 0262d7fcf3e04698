"""A run that fails again and again: restarted while a restart may help, three times at most, and then not any more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import rig, under_torchrun
from faults.job import HALVED, Job
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.trouble import Trouble
from halfstep import errors
from halfstep.train.status import MOST_FRUITLESS
from tests.support.tiny_task import Tiny

ID = "F37"
WHAT = "without a newer save, a run is restarted at most 3 times, and never after a failure that a restart cannot fix"
SETTINGS = {**HALVED, "train.steps": 20, "world.timeout": 10.0}
LAST, MANY = 7, 8
"""Restarts of the agent at most: more than there may be."""
INCURABLE = {
    64: errors.HalfstepError,
    65: errors.BadData,
    77: errors.Unsafe,
    78: errors.BadRecipe,
    79: errors.StateMismatch,
    80: errors.Diverged,
}
AT_STEP = {"kill": -9, "segfault": -11, "leave": 1, "fail": 70}
SMALL = ("kill", 78)


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    with rig.scratch() as folder:
        for kind in AT_STEP if full else SMALL[:1]:
            trials[f"{kind} at a step"] = _again_and_again(folder / kind, Trouble(kind, step=2))
        for code in INCURABLE if full else SMALL[1:]:
            trials[f"exit code {code}"] = _incurable(folder / str(code), Raises(int(code)))
        if full:
            trials["a save between"] = _gets_on(folder / "moves", Trouble("kill", step=5))
            trials["an error while the model is made"] = _again_and_again(folder / "made", FailsToStart())
            trials["under torchrun"] = _under_torchrun(folder / "torchrun")
    return outcome(trials, f"{MOST_FRUITLESS} restarts")


@dataclass
class Raises:
    """A failure whose exit code says that a restart would end alike; in the first attempt only, to see a second one."""

    code: int

    def __call__(self) -> None:
        loss = Tiny.loss
        steps = 0

        def failing(task: Tiny, model: Any, batch: Any, metrics: Any = None) -> Any:
            nonlocal steps
            steps += model.training
            if steps == 7 and model.training:
                error = INCURABLE[self.code]("of a row of the fault matrix")
                error.exit_code = self.code
                raise error
            return loss(task, model, batch, metrics)

        Tiny.loss = failing  # type: ignore[method-assign]


@dataclass
class FailsToStart:
    """A mistake in the task's own code, before there is a step."""

    def __call__(self) -> None:
        def failing(task: Tiny) -> Any:
            raise ImportError("of a row of the fault matrix")

        Tiny.model = failing  # type: ignore[method-assign]


def _attempts(job: Job, before: Any) -> tuple[int, list[int]]:
    """How many attempts an agent makes that restarts whatever fails, until the run itself refuses; and its last codes.

    An attempt that refuses leaves no new launch in the status, and takes no step.
    """
    for attempt in range(MANY):
        codes = job.run(SETTINGS, attempt=attempt, before=before)
        if codes == [0, 0] or "restarts in a row" in job.said(0):
            return attempt, codes
    return MANY, codes


def _again_and_again(folder: Path, trouble: Any) -> str | None:
    folder.mkdir()
    job = Job(folder)
    attempts, codes = _attempts(job, trouble)
    told = job.statuses()[0]
    return first_wrong(
        (f"{attempts} attempts", lambda: attempts == 1 + MOST_FRUITLESS),
        (f"refused with {codes}", lambda: codes[0] == codes[1] != 0),
        (f"a supervisor knows: {told}", lambda: told["restartable"] is False),
    )


def _incurable(folder: Path, raises: Raises) -> str | None:
    job = Job(folder)
    first = job.run(SETTINGS, before=raises)
    second = job.run(SETTINGS, attempt=1)
    said = job.said(0)
    return first_wrong(
        (f"exit codes {first}", lambda: raises.code in first),
        ("not restartable", lambda: not job.statuses()[first.index(raises.code)]["restartable"]),
        (f"the restart ends alike: {second}", lambda: second == [raises.code] * 2),
        (f"and says why: {said}", lambda: "of a row of the fault matrix" in said),
        ("a person may start it again", lambda: Job(folder).run(SETTINGS) == [0, 0]),
    )


def _gets_on(folder: Path, trouble: Trouble) -> str | None:
    """Killed in the fifth step of every attempt: each comes a save further, and the run to its end."""
    attempts, codes = _attempts(job := Job(folder), trouble)
    return first_wrong(
        (f"exit codes {codes} after {attempts} restarts", lambda: codes == [0, 0] and attempts > MOST_FRUITLESS),
        ("all steps are there", lambda: len(rig.ending(folder).losses) == 20),
        ("and it says so", lambda: job.statuses()[0]["code"] == 0),
    )


def _under_torchrun(folder: Path) -> str | None:
    ended = under_torchrun.launch(folder, SETTINGS, Trouble("kill", step=2), restarts=MOST_FRUITLESS + 1, always=True)
    return first_wrong(
        (f"torchrun's own restarts: {ended}", lambda: len(ended.starts) == 2 + MOST_FRUITLESS and ended.code != 0),
        ("the last one was refused", lambda: "restarts in a row" in rig.said(folder, 0)),
    )
