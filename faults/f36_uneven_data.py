"""Samples that do not divide by ranks and batches: every rank takes as many steps, and every sample is used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from faults import mutants, rig, stepped
from faults.f30_other_ranks import World
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.journal.jsonl import read_events
from tests.support.ranks import Ranks

ID = "F36"
WHAT = "with data that ranks cannot share evenly, all run equally many steps, and use each sample once per epoch"
EPOCHS = 2
CASES = {
    False: ((17, 4, 1), (31, 5, 2), (4, 4, 2)),
    True: (
        (16, 4, 1),
        (17, 4, 1),
        (5, 8, 1),
        (16, 4, 2),
        (17, 4, 2),
        (31, 5, 2),
        (4, 4, 2),
        (16, 4, 3),
        (10, 3, 3),
        (23, 2, 4),
        (7, 4, 4),
        (64, 8, 4),
    ),
}
"""Samples, samples of a batch, ranks."""


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    most, world = 0, World()
    try:
        with rig.scratch() as folder:
            for case in CASES[full]:
                trials[str(case)], repeats = _case(world, folder / "-".join(map(str, case)), *case)
                most = max(most, repeats)
    finally:
        world.stop()
    ranks = Ranks(2)
    try:
        for mode in ("ddp", "fsdp") if full else ("ddp",):
            trials[f"a rank runs out, {mode}"] = _exhausted(ranks(with_fewer_batches, mode))
    finally:
        ranks.stop()
    return outcome(trials, f"{most} samples repeated at most, and said so")


def _case(world: World, folder: Path, samples: int, batch: int, size: int) -> tuple[str | None, int]:
    asked = {"data.samples": samples, "train.batch_size": batch, "train.steps": None, "train.epochs": EPOCHS}
    found = world((size, "auto"), folder, "fp32", **asked, **{"schedule.warmup_steps": 0})
    steps = -(-samples // (batch * size))
    repeats = steps * batch * size - samples
    wrong = first_wrong(
        (f"exit codes {[(one['code'], one['said']) for one in found]}", lambda: not any(one["code"] for one in found)),
        ("as many steps on every rank", lambda: {len(one["ids"]) for one in found} == {EPOCHS * steps}),
        ("every sample in every epoch", lambda: all(_whole(found, epoch, steps, samples) for epoch in range(EPOCHS))),
        ("the repeats are said", lambda: _start(folder)["repeated_samples"] == repeats),
    )
    return wrong, repeats


def _whole(found: list[dict[str, Any]], epoch: int, steps: int, samples: int) -> bool:
    """Whether an epoch has each sample once, and those that fill it up once more or as often as is needed."""
    mine = range(epoch * steps, (epoch + 1) * steps)
    counts = Counter(number for one in found for step in mine for number in one["ids"][step])
    return set(counts) == set(range(samples)) and max(counts.values()) - min(counts.values()) <= 1


def _start(folder: Path) -> dict[str, Any]:
    return next(event for event in read_events(folder / "journal.jsonl") if event["event"] == "start")


# -- a loop of one's own, in which a rank has fewer batches ----------------------------------------------------------


def with_fewer_batches(rank: int, mode: str) -> dict[str, Any]:
    mutants.apply(mutants.current())
    stepper = stepped.make(mode, "fp32")
    reports = []
    for number in range(6):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        out = rank == 1 and number >= 4
        reports.append(stepper.step(None) if out else stepper.step(stepped.loss, batch))
    return {"applied": [report.applied for report in reports], "weights": stepped.weights(stepper)}


def _exhausted(found: list[dict[str, Any]]) -> str | None:
    return first_wrong(
        ("every step is applied", lambda: all(one["applied"] == [True] * 6 for one in found)),
        ("weights are the same on all ranks", lambda: len({one["weights"] for one in found}) == 1),
    )
