"""A learning rate that is ten thousand times too high from some step on: the run ends soon, and loses nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, list_generations, list_set_aside, name_generation
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.journal.jsonl import read_events
from halfstep.runs import fit
from halfstep.train.loop import Loop
from tests.support.digest import digest_of
from tests.support.troubled import rate_times

ID = "F12"
WHAT = "a learning rate 10,000 times too high ends the run with 80 within 20 steps; its last good checkpoint remains"
SEEDS = {False: 1, True: 10}
TIMES, WITHIN, GAVE_UP = 1e4, 20, 80
MODES = ("watch", "repair")
SETTINGS: dict[str, Any] = {"train.steps": 120, "guard.spikes": "refuse", "checkpoint.keep": 3}


@dataclass(frozen=True)
class TooHigh:
    """Breaks the learning rate of this process from an attempt on."""

    since: int

    def __call__(self) -> Callable[[], None]:
        make_loop = fit.make_loop

        def built(*given: Any, **more: Any) -> Loop:
            loop = make_loop(*given, **more)
            rate_times(TIMES, self.since)(loop)
            return loop

        fit.make_loop = built

        def mend() -> None:
            fit.make_loop = make_loop

        return mend


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    latest = 0
    with rig.scratch() as folder:
        for mode in MODES:
            for seed in range(SEEDS[full]):
                onset = random.Random(seed).randrange(31, 60)
                place = folder / f"{mode}-{seed}"
                settings = {**SETTINGS, "train.seed": seed, "guard.mode": mode}
                trials[f"{mode}, seed {seed}, from step {onset}"] = _trial(place, settings, onset)
                latest = max(latest, rig.last_step(place) - onset)
    return outcome(trials, f"gave up {latest} steps after the onset at most")


def _trial(folder: Path, settings: dict[str, Any], onset: int) -> str | None:
    # The same run with nothing wrong until then says what a good checkpoint is, to the bit.
    good = folder.with_name(f"{folder.name}-good")
    healthy = rig.run(good, {**settings, "checkpoint.keep": 100, "train.steps": 120})
    code = rig.run(folder, settings, before=TooHigh(onset))
    place = folder / CHECKPOINTS
    left = list_generations(place)
    return first_wrong(
        ("the healthy run failed", lambda: healthy == 0),
        (f"exit code {code}", lambda: code == GAVE_UP),
        ("it went on for too long", lambda: rig.last_step(folder) - onset <= WITHIN),
        ("more than two rollbacks", lambda: _rollbacks(folder) <= 2),
        ("the newest checkpoint is not from before", lambda: left[0].attempt < onset <= left[0].attempt + 3),
        ("the newest checkpoint is not whole", lambda: _newest(place) == left[0].name),
        ("the last good checkpoint has other bits", lambda: _same(left[0], good / CHECKPOINTS)),
        ("the error does not name it", lambda: left[0].name in rig.said(folder)),
        ("a checkpoint is not finite", lambda: all(_is_finite(one) for one in _all(place))),
    )


def _rollbacks(folder: Path) -> int:
    told = read_events(folder / "journal.jsonl")
    return sum(event["event"] == "guard" and "rolled back" in event["text"] for event in told)


def _newest(place: Path) -> str | None:
    verdict, damaged = find_newest_intact(place)
    return verdict.generation.name if verdict is not None and not damaged else None


def _same(generation: CheckpointDir, place: Path) -> bool:
    """But for the recipe and the journal, which are those of another run."""
    twin = next(one for one in list_generations(place) if one.attempt == generation.attempt)
    return _content(generation) == _content(twin)


def _content(generation: CheckpointDir) -> str:
    plain, tensors = read_rank_state(generation, 0)
    return digest_of({key: plain[key] for key in ("counts", "optimizers", "lr_schedulers", "guards")}, tensors)


def _all(place: Path) -> list[CheckpointDir]:
    aside = [name_generation(place, int(path.name[5:13]), 0)._replace(path=path) for path in list_set_aside(place)]
    return [*list_generations(place), *aside]


def _is_finite(generation: CheckpointDir) -> bool:
    _, tensors = read_rank_state(generation, 0)
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())
