"""A run goes on with copies in the place of shards, or in shards of another size, on the same ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from faults import mutants, rig
from faults.f30_other_ranks import CUT, GLOBAL, SETTINGS, STEPS
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.errors import HalfstepError
from halfstep.journal.jsonl import read_events
from halfstep.runs import fit
from halfstep.train.outputs import LAST
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny

ID = "F54"
WHAT = "a resumed run claims to be exact only if it ends in the same bits"
TWO, FOUR = ("ddp", "fsdp"), ("ddp", "fsdp", "hsdp")


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    for size, modes in ((2, TWO), (4, FOUR)) if full else ((2, TWO),):
        world = World(size)
        try:
            with rig.scratch() as folder:
                for mode in modes:
                    world(folder / mode, mode)
                for before in modes:
                    for after in modes:
                        trials[f"{size} ranks, {before} to {after}"] = _claimed(world, folder, before, after)
        finally:
            world.ranks.stop()
    return outcome(trials, "no claim without the bits")


class World:
    """Ranks that take the same samples a step, however many they are."""

    def __init__(self, size: int) -> None:
        self.size, self.ranks = size, Ranks(size)

    def __call__(self, folder: Path, mode: str) -> list[str]:
        found: list[str] = self.ranks(launched, str(folder), mode, GLOBAL // self.size)
        return found


def launched(rank: int, folder: str, mode: str, batch: int) -> str:
    """One launch on one rank; what it says where it fails."""
    mutants.apply(mutants.current())
    recipe = Path(f"{folder}-{rank}.yaml")
    recipe.write_text("task: tiny\n")
    settings: dict[str, Any] = {**SETTINGS, "world.mode": mode, "train.batch_size": batch, "run.dir": folder}
    settings |= {"world.shard_size": 2} if mode == "hsdp" else {}
    try:
        fit.fit(recipe, task=Tiny, settings=settings, quiet=True)
    except HalfstepError as error:
        return str(error)
    return ""


def _claimed(world: World, folder: Path, before: str, after: str) -> str | None:
    place = folder / f"{before}-{after}"
    shutil.copytree(folder / before, place)
    (place / "result.json").unlink()
    for one in list_generations(place / CHECKPOINTS):
        if one.attempt > CUT:
            shutil.rmtree(one.path)
    said = world(place, after)
    resumed = [event["resumed"] for event in read_events(place / "journal.jsonl") if event["event"] == "start"][-1]
    same = (place / LAST).read_bytes() == (folder / before / LAST).read_bytes()
    is_exact = bool(resumed["exact"])
    return first_wrong(
        (f"it ended: {said}", lambda: not any(said)),
        (f"{STEPS} steps", lambda: resumed["attempt"] == CUT),
        ("exact, and other bits", lambda: same or not is_exact),
        ("other shards, and exact", lambda: before == after or not is_exact),
        ("not exact, and no reason", lambda: is_exact or bool(resumed["reasons"])),
        ("two ranks in the same shards are exact", lambda: is_exact or before != after or world.size > 2),
    )
