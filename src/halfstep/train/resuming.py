"""An unfinished run taken up again: its newest whole checkpoint is found, compared with the run, and put into it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from halfstep import world
from halfstep.errors import HalfstepError, StateMismatch
from halfstep.guard.remedy.remedies import Remedies
from halfstep.train.checkpoint.commit import sweep
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.checkpoint.generation import BAD, CHECKPOINTS, Generation
from halfstep.train.checkpoint.manifest import read_manifest
from halfstep.train.checkpoint.reading import newest_whole, none_whole, read_state
from halfstep.train.checkpoint.spoilt import sweep_aside
from halfstep.train.cures import cures_in
from halfstep.train.environment import differences, environment
from halfstep.train.journal import journal as events
from halfstep.train.journal.cutting import JOURNAL, cut_back, sizes
from halfstep.train.journal.jsonl import kept_events, last_time
from halfstep.train.keeping import LAST
from halfstep.train.loop import Loop
from halfstep.train.measured import Measured
from halfstep.train.restoring import restore
from halfstep.train.setup import AnyRecipe
from halfstep.train.start import decided_once
from halfstep.train.state import State

T = TypeVar("T")
_DRAFT = re.compile(
    r"\.(best\.safetensors|last\.safetensors|last-ema\.safetensors|recipe\.yaml|result\.json|task\.json"
    r"|status\.rank-[0-9]{5}\.json|curves\.png|epoch-[0-9]{4,}\.png)\.[0-9]+"
)
"""What a run that is killed in the middle of writing a file leaves beside it; see `files.replacing`."""


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from, read and verified; nothing was changed by it yet."""

    generation: Generation
    state: State
    environment: dict[str, Any]
    passed_over: list[str]
    """Newer ones that are damaged, and what is wrong with them."""

    @property
    def measured(self) -> Measured:
        return Measured.from_dict(self.state.measured)

    def measured_for(self, recipe: AnyRecipe) -> Measured | None:
        """The same, unless what is asked for has changed: then it is found out again."""
        return self.measured if self.state.recipe.get("precision") == recipe.precision else None

    def cures_for(self, recipe: AnyRecipe) -> Remedies | None:
        """What the run's guard had placed; for another precision than it was asked for then, it would be no cure."""
        return cures_in(self.state.guards) if self.state.recipe.get("precision") == recipe.precision else None


@dataclass(frozen=True)
class Resumed:
    """How a run was taken up again: what its journal says of it."""

    attempt: int = 0
    epoch: int = 0
    checkpoint: str | None = None
    repeated: int | None = None
    """Steps that were done, and are done again."""
    because: list[str] = field(default_factory=list)
    """Why the bits may come out otherwise than without the interruption."""
    changed: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """That the run had taken when the checkpoint was made."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exact": not self.because and not self.changed}


def find(folder: Path) -> Found | None:
    """The newest whole checkpoint of a run, or None where it was never saved. Called by every process."""
    decided = json.loads(decided_once(lambda: json.dumps(_chosen(folder))))
    if decided["name"] is None:
        return None
    generation = Generation(folder / CHECKPOINTS / decided["name"], decided["attempt"], decided["number"])
    manifest = read_manifest(generation)
    if manifest.world != world.size():
        raise StateMismatch(
            f"{generation.name} was saved by {manifest.world} processes",
            allowed=f"as many as there are now: {world.size()}",
            do=f"torchrun --nproc-per-node {manifest.world} ..., or add --new for a folder of its own",
        )
    state = _of_all(lambda: State.from_parts(*read_state(generation, world.rank()), where=str(generation.path)))
    return Found(generation, state, dict(manifest.environment), decided["passed_over"])


def _chosen(folder: Path) -> dict[str, Any]:
    """By rank 0, which holds the lock: what lies about is cleared away, and what is damaged is set aside."""
    place, disk = folder / CHECKPOINTS, Disk()
    verdict, damaged = newest_whole(place)
    if verdict is None:
        _refuse_lost(folder)
    for one in damaged:
        # One that cannot be renamed, or was once before, stays where it is, and is passed over again.
        with contextlib.suppress(OSError):
            disk.rename(one.generation.path, one.generation.path.with_name(one.generation.name + BAD))
    sweep(place, disk)
    sweep_aside(place, disk)
    _remove_drafts(folder, disk)
    passed_over = [f"{one.generation.name}: {one.problem}" for one in damaged]
    if verdict is None:
        return {"name": None, "passed_over": passed_over}
    generation = verdict.generation
    return {
        "name": generation.name,
        "attempt": generation.attempt,
        "number": generation.number,
        "passed_over": passed_over,
    }


def _refuse_lost(folder: Path) -> None:
    """A run that was saved, and has no checkpoint now, is not begun anew in silence."""
    if _was_saved(folder):
        raise none_whole(folder / CHECKPOINTS, ["there are none, though the journal tells of some"])
    # While the journal is there it would tell; weights alone may be older than the first checkpoint.
    if not (folder / JOURNAL).exists() and (folder / LAST).exists():
        raise none_whole(folder / CHECKPOINTS, [f"there are none, and no {JOURNAL}, though {LAST} is there"])


def _remove_drafts(folder: Path, disk: Disk) -> None:
    for place in (folder, folder / "pictures"):
        drafts: list[Path] = []
        with contextlib.suppress(OSError):
            drafts += [path for path in place.iterdir() if _DRAFT.fullmatch(path.name)]
        for path in drafts:
            with contextlib.suppress(OSError):
                disk.remove(path)


def _was_saved(folder: Path) -> bool:
    return any(_tells_of_one(event) for event in kept_events(folder / JOURNAL))


def _tells_of_one(event: events.Event) -> bool:
    # The word of the checkpoint that a run went on from is cut away with the rest; that it went on from it stays.
    resumed = event.get("resumed")
    return event.get("what") == "checkpoint" or (isinstance(resumed, dict) and bool(resumed.get("checkpoint")))


def take_up(loop: Loop, found: Found | None, folder: Path, accepted: Collection[str]) -> Resumed:
    """Put the checkpoint into a loop that was built for it, and cut the journal back to it; or begin from nothing.

    Whatever does not fit is refused before anything of the run, or of its folder, is changed.
    """
    if found is None:
        _cut(folder, {})
        return Resumed()
    changed = _of_all(lambda: restore(loop.live, found.state, accepted))
    repeated = max(0, _last_attempt(folder, _size_at(found)) - found.generation.attempt) if world.rank() == 0 else 0
    _cut(folder, found.state.cursor["journal"])
    loop.checkpoints.resumed(found.generation)
    loop.guarding.taken_up(found.generation.attempt)
    return Resumed(
        attempt=found.generation.attempt,
        epoch=loop.progress.epoch,
        checkpoint=found.generation.name,
        repeated=repeated,
        because=differences(found.environment, environment(loop.stepper.device)),
        changed=changed,
        passed_over=found.passed_over,
        seconds=last_time(folder / JOURNAL),
    )


def _of_all(do: Callable[[], T]) -> T:
    """Done on every process; where one of them refuses, all do: the others would wait for it."""
    refusal: HalfstepError | None = None
    try:
        done = do()
    except HalfstepError as error:
        refusal = error
    parts = None if refusal is None else [refusal.given, refusal.allowed, refusal.do, refusal.exit_code]
    told = [json.loads(text) for text in world.from_all(json.dumps(parts))]
    if refusal is not None:
        raise refusal
    for rank, one in enumerate(told):
        if one is not None:
            theirs = HalfstepError(f"rank {rank}: {one[0]}", allowed=one[1], do=one[2])
            theirs.exit_code = one[3]
            raise theirs
    return done


def _cut(folder: Path, sizes: dict[str, int]) -> None:
    if world.rank() == 0:
        cut_back(folder, sizes)


def _size_at(found: Found) -> int:
    """Of the journal, when the checkpoint was taken; what is no size is refused where the journal is cut."""
    size = found.state.cursor["journal"].get(JOURNAL)
    return size if type(size) is int and size >= 0 else 0


def _last_attempt(folder: Path, after: int = 0) -> int:
    """The last step that the journal tells of, in what was written after its first bytes."""
    written = kept_events(folder / JOURNAL, min(after, sizes(folder)[JOURNAL]))
    steps = [event.get("attempt") for event in written if event["event"] == events.STEP]
    return max((attempt for attempt in steps if type(attempt) is int), default=0)
