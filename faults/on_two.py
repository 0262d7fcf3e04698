"""The run of `everything` on two processes: stopped by a signal to one of them, and taken up by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import halfstep
from faults import child, mutants, rig
from faults.everything import SETTINGS, Everything, Launch
from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.errors import HalfstepError
from halfstep.runs import fit
from halfstep.train.environment import collect_rng_states
from halfstep.train.loop import Loop
from tests.support.digest import digest_of
from tests.support.ranks import Ranks

STOP_AT = 8
TWO = {**child.RECIPE, **SETTINGS, "train.steps": 14, "train.batch_size": 4}


def checks() -> dict[str, bool]:
    """What holds of the run on two processes, by what would be wrong."""
    ranks = Ranks(2)
    try:
        with rig.scratch() as folder:
            return _checks(ranks, folder)
    finally:
        ranks.stop()


def _checks(ranks: Ranks, folder: Path) -> dict[str, bool]:
    whole = ranks(launched, str(folder / "whole"), None)
    stopped = ranks(launched, str(folder / "cut"), STOP_AT)
    resumed = ranks(launched, str(folder / "cut"), None)
    began, saved = ([one[key] for one in run] for key, run in (("began", resumed), ("saved", stopped)))
    return {
        "two: not run to the end": [one["code"] for one in whole + resumed] == [0] * 4,
        "two: not stopped together": [(one["code"], one["attempt"]) for one in stopped] == [(75, STOP_AT + 1)] * 2,
        "two: other random numbers than saved": began == saved,
        "two: the same random numbers on both": len(set(began)) == 2,
        "two: other bits": digests(folder / "whole") == digests(folder / "cut"),
    }


def launched(rank: int, folder: str, stop_at: int | None) -> dict[str, Any]:
    """One launch, on one of the processes; the signal comes to the second one alone."""
    mutants.apply(mutants.current())
    seen: dict[str, Any] = {"code": 0, "attempt": 0, "began": "", "saved": ""}
    mend = Launch(stop_at if rank == 1 else None, "SIGTERM")()
    make_loop, resume_from = fit.make_loop, fit.resume_from
    fit.make_loop = lambda *given, **more: _watched(make_loop(*given, **more), seen)
    fit.resume_from = lambda loop, *more: _noted(resume_from(loop, *more), loop, seen)
    try:
        recipe = Path(f"{folder}-{rank}.yaml")
        recipe.write_text("task: tiny\n")
        halfstep.fit(recipe, task=Everything, settings={**TWO, "run.dir": folder}, quiet=True)
    except HalfstepError as error:
        seen["code"] = error.exit_code
    finally:
        fit.resume_from = resume_from
        mend()
    return seen


def _watched(loop: Loop, seen: dict[str, Any]) -> Loop:
    save = loop.checkpoints.save

    def saving() -> None:
        seen["attempt"], seen["saved"] = loop.progress.attempts, digest_of(collect_rng_states(loop.stepper.device))
        save()

    loop.checkpoints.save = saving  # type: ignore[method-assign]
    return loop


def _noted(resumed: Any, loop: Loop, seen: dict[str, Any]) -> Any:
    seen["began"] = digest_of(collect_rng_states(loop.stepper.device))
    return resumed


def same(folder: Path, other: Path) -> bool:
    """Whether two finished runs have the same losses, weights and saved states, on every rank."""
    return rig.ending(folder) == rig.ending(other) and digests(folder) == digests(other)


def digests(folder: Path) -> list[str]:
    """Of what each process saved last, but for the journal's length."""
    verdict, _ = find_newest_intact(folder / CHECKPOINTS)
    if verdict is None or verdict.manifest is None:
        return []
    found = []
    for rank in range(verdict.manifest.world_size):
        plain, tensors = read_rank_state(verdict.generation, rank)
        plain["position"].pop("journal_sizes")
        plain["recipe"].pop("run")
        found.append(digest_of(plain, tensors))
    return found
