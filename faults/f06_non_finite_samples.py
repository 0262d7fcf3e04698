"""A sample that holds NaN or an infinity: the step is skipped everywhere, and nothing of it stays."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

from faults.outcome import Outcome
from halfstep import distributed
from halfstep.journal.events import Journal
from halfstep.recipe.resolve import resolve_recipe
from halfstep.train.run import make_loop
from tests.support.digest import digest_of_run
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny

ID = "F06"
WHAT = "a non-finite sample skips one step on every rank, changes no bit, is named, and is not used again"
POISONS, PLACES, PRECISIONS = ("nan", "inf", "-inf"), (0, 1), ("fp32", "bf16", "fp16")
GUILTY, SAMPLES, WINDOW = 5, 16, 4
SEEDS = {False: 1, True: 3}
ON_RANKS = {False: 5, True: 1}
"""Of how many faults one is tried on two ranks too: by fives each poison, place and precision is still met."""


def run(full: bool) -> Outcome:
    faults = list(itertools.product(POISONS, PLACES, PRECISIONS, range(SEEDS[full])))
    found = [judge(0, *fault) for fault in faults]
    on_ranks, ranks = faults[:: ON_RANKS[full]], Ranks(2)
    try:
        found += [_both(ranks(judge, *fault)) for fault in on_ranks]
    finally:
        ranks.stop()
    wrong = [f"{fault}: {text}" for fault, text in zip(faults + on_ranks, found, strict=True) if text]
    return Outcome(len(found) - len(wrong), len(found), wrong[0] if wrong else "0 bits moved")


def _both(texts: list[str]) -> str:
    return "; ".join(text for text in texts if text)


def judge(rank: int, poison: str, place: int, precision: str, seed: int) -> str:
    """Train two epochs over a poisoned sample; what went wrong, in words, or nothing."""
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = _loop(poison, place, precision, seed, Path(folder), told)
        moved = [_epoch(loop) for _ in range(2)]
        loop.checkpoints.close()
    skips = [event for event in told if event["event"] == "step" and not event["applied"]]
    finite = all(tensor.isfinite().all() for tensor in loop.model.state_dict().values())
    checks = {
        "bits moved on a skip": not any(moved),
        "not skipped exactly once, in the first epoch": [event["epoch"] for event in skips] == [1],
        "the sample was not named": all(GUILTY in event["ids"] for event in skips),
        "the sample was not quarantined": [event["quarantined"] for event in skips] == [[GUILTY]],
        "a weight is not finite": finite,
        "the steps do not add up": loop.stepper.counts.applied == 2 * SAMPLES // WINDOW - 1,
        "the schedule moved on a skip": loop.parts.stepper.state_dict()["optimizers"]["loss"]["schedule"]["last_epoch"]
        == loop.stepper.counts.applied,
    }
    return ", ".join(text for text, good in checks.items() if not good)


class _Told:
    """A listener that keeps what it hears."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = events

    def on_event(self, event: dict[str, Any]) -> None:
        self._events.append(event)

    def close(self) -> None: ...


def _loop(poison: str, place: int, precision: str, seed: int, folder: Path, told: list[dict[str, Any]]) -> Any:
    raw = {
        "task": "tiny",
        "precision": precision,
        "model": {"batchnorm": True},
        "data": {"samples": SAMPLES, "nan": [GUILTY], "poison": poison, "where": place},
        # Low enough for fp16 to overflow for no other reason.
        "loss_scale": {"init_scale": 16.0},
        "train": {
            "epochs": 2,
            "batch_size": WINDOW // distributed.count_ranks(),
            "num_workers": 0,
            "seed": seed,
            "ema": 0.9,
        },
    }
    recipe = resolve_recipe(raw, Tiny.schema, (), "poisoned").recipe
    loop = make_loop(Tiny(recipe), recipe, folder, Journal([_Told(told)]))
    loop.model.train()
    return loop


def _epoch(loop: Any) -> int:
    """Skips of an epoch after which any bit of the state was another than before."""
    moved = 0
    before = digest_of_run(loop.stepper)
    for report in loop.steps():
        after = digest_of_run(loop.stepper)
        moved += not report.applied and after != before
        before = after
    loop.progress.epoch, loop.progress.step_in_epoch = loop.progress.epoch + 1, 0
    return moved
