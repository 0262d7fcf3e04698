"""A run goes on with more or fewer ranks, or in shards instead of copies: the same samples a step, the same weights."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from faults import child, rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep import distributed
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.reading import read_rank_state
from halfstep.errors import HalfstepError
from halfstep.journal.jsonl import read_events
from halfstep.runs import fit
from halfstep.train.loop import Loop
from halfstep.train.state import State
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny

ID = "F30"
WHAT = "a run resumes with other ranks or shards: bitwise equal weights, the same samples, matching losses"
WORLDS: tuple[tuple[int, str], ...] = ((1, "auto"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"))
SMALL = (((2, "ddp"), (1, "auto")), ((1, "auto"), (2, "fsdp")))
MOST = {"fp32": 1e-5, "bf16": 1e-2}
"""How far losses may be apart, relative to their size."""
GLOBAL, STEPS, CUT = 8, 40, 12
SETTINGS: dict[str, Any] = {
    **child.RECIPE,
    "model.batchnorm": False,
    "train.steps": STEPS,
    "checkpoint.keep": 20,
    "run.log_every": 100,
}
REFUSED = 79


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    furthest = dict.fromkeys(MOST, 0.0)
    world = World()
    pairs = [pair for pair in itertools.permutations(WORLDS, 2) if pair[0] != pair[1]] if full else SMALL
    try:
        with rig.scratch() as folder:
            for precision in MOST if full else ("fp32",):
                whole = {
                    one: world(one, folder / f"{precision}-{one[0]}-{one[1]}", precision)
                    for one in {before for before, _ in pairs}
                }
                for before, after in pairs:
                    name = f"{precision}, {_named(before)} to {_named(after)}"
                    trials[name], far = _changed(world, folder, precision, before, after, whole[before])
                    furthest[precision] = max(furthest[precision], far)
            trials["another global batch"] = _refused(world, folder)
    finally:
        world.stop()
    return outcome(trials, ", ".join(f"{name} within {far:.1e}" for name, far in furthest.items() if far))


class World:
    """Ranks of each number, started once."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}

    def __call__(self, of: tuple[int, str], folder: Path, precision: str, **more: Any) -> list[dict[str, Any]]:
        size, mode = of
        asked = {"world.mode": mode, "precision": precision, "train.batch_size": GLOBAL // size, **more}
        found: list[dict[str, Any]] = self._ranks.setdefault(size, Ranks(size))(launched, str(folder), asked)
        return found

    def stop(self) -> None:
        for ranks in self._ranks.values():
            ranks.stop()


def launched(rank: int, folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """One launch on one rank: its exit code, the samples of each step, and whether it began with what was saved."""
    seen: dict[str, Any] = {"code": 0, "ids": [], "differs": [], "said": ""}
    make_loop, resume_from = fit.make_loop, fit.resume_from
    fit.make_loop = lambda *given, **more: _watched(make_loop(*given, **more), seen)
    fit.resume_from = lambda loop, found, *more: _compared(resume_from(loop, found, *more), loop, found, seen)
    recipe = Path(f"{folder}-{rank}.yaml")
    recipe.write_text("task: tiny\n")
    try:
        fit.fit(recipe, task=Tiny, settings={**SETTINGS, **asked, "run.dir": folder}, quiet=True)
    except HalfstepError as error:
        seen["code"], seen["said"] = error.exit_code, str(error)
    finally:
        fit.make_loop, fit.resume_from = make_loop, resume_from
    return seen


def _watched(loop: Loop, seen: dict[str, Any]) -> Loop:
    windows = loop.train.windows

    def counted(*given: Any) -> Any:
        for window in windows(*given):
            seen["ids"].append([number for batch in window for number in batch.ids])
            yield window

    loop.train.windows = counted  # type: ignore[method-assign]
    return loop


def _compared(resumed: Any, loop: Loop, found: Any, seen: dict[str, Any]) -> Any:
    plain, tensors = read_rank_state(found.generation, 0)
    then, now = State.from_parts(plain, tensors, "the checkpoint"), State.of(loop.live)
    for name, saved in then.weights["parameters"].items():
        if not distributed.gather_full_tensor(now.weights["parameters"][name]).equal(saved):
            seen["differs"].append(name)
    return resumed


def _changed(
    world: World, folder: Path, precision: str, before: tuple[int, str], after: tuple[int, str], whole: Any
) -> tuple[str | None, float]:
    source = folder / f"{precision}-{before[0]}-{before[1]}"
    place = folder / f"{precision}-{_named(before)}-{_named(after)}".replace(" ", "-")
    shutil.copytree(source, place)
    (place / "result.json").unlink()
    for one in list_generations(place / CHECKPOINTS):
        if one.attempt > CUT:
            shutil.rmtree(one.path)
    found = world(after, place, precision)
    far = _furthest(place, source) if found[0]["code"] == 0 else 0.0
    wrong = first_wrong(
        (f"exit codes {[(one['code'], one['said']) for one in found]}", lambda: not any(one["code"] for one in found)),
        ("in the precision that was asked for", lambda: _start(place)["precision"]["chosen"] == precision),
        ("it went on from the save", lambda: len(found[0]["ids"]) == STEPS - CUT),
        ("the weights are those of the save, to the bit", lambda: not any(one["differs"] for one in found)),
        ("every step has the same samples", lambda: _samples(found) == _samples(whole)[CUT:]),
        (f"losses apart by {far:.1e}", lambda: far <= MOST[precision]),
        # Two ranks add two numbers, in copies and in shards: there it may say so, where it is true.
        ("it does not claim to be exact", lambda: _start(place)["resumed"]["exact"] is False or far == 0.0),
    )
    return wrong, far


def _samples(found: list[dict[str, Any]]) -> list[list[int]]:
    """Of each step, over all ranks."""
    return [
        sorted(number for part in parts for number in part)
        for parts in zip(*(one["ids"] for one in found), strict=True)
    ]


def _furthest(folder: Path, other: Path) -> float:
    def losses(of: Path) -> list[float]:
        return [event["loss"] for event in read_events(of / "journal.jsonl") if event["event"] == "step"]

    return max(abs(one - two) / abs(two) for one, two in zip(losses(folder), losses(other), strict=True))


def _start(folder: Path) -> dict[str, Any]:
    starts = [event for event in read_events(folder / "journal.jsonl") if event["event"] == "start"]
    found: dict[str, Any] = starts[-1]
    return found


def _refused(world: World, folder: Path) -> str | None:
    """Ranks that would make a step of other samples: refused, with the setting that keeps them."""
    place = folder / "refused"
    shutil.copytree(folder / "fp32-2-ddp", place)
    (place / "result.json").unlink()
    found = world((1, "auto"), place, "fp32", **{"train.batch_size": GLOBAL // 2})
    return first_wrong(
        (f"exit code {found[0]['code']}", lambda: found[0]["code"] == REFUSED),
        ("with what to type", lambda: "train.microbatches=2" in found[0]["said"]),
    )


def _named(world: tuple[int, str]) -> str:
    return f"{world[0]} {world[1]}"
