"""A bit of a weight, an average or an optimizer's state flips on one rank: found soon, named, and never saved."""

from __future__ import annotations

import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from faults import child, mutants, rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep import distributed
from halfstep.errors import HalfstepError
from halfstep.runs import fit
from halfstep.train.loop import Loop
from halfstep.train.replicas import Replicas
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny

ID = "F18"
WHAT = "a bit flip on one rank ends the run with 80 and its tensor's name within 50 steps, and is never saved"
TIMES, CLEAN = {False: 3, True: 50}, {False: 100, True: 2000}
"""Flipped bits, and steps without any."""
WITHIN, GAVE_UP = 50, 80
MOST_SHARE = 0.01
SETTINGS: dict[str, Any] = {
    **child.RECIPE,
    "model.batchnorm": False,
    "train.steps": 160,
    "train.batch_size": 4,
    "checkpoint.every_steps": WITHIN,
    "run.log_every": 100,
}
KINDS = ("weight", "average", "exp_avg", "exp_avg_sq")


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    latest, rounded, chance, ranks = 0, 0, random.Random(18), Ranks(2)
    try:
        with rig.scratch() as folder:
            assert [one["code"] for one in ranks(trained, str(folder / "whole"), None, {})] == [0, 0]
            while len(trials) < TIMES[full]:
                number = len(trials) + rounded
                flip = _drawn(chance, KINDS[number % len(KINDS)])
                wrong, steps = _found(ranks, folder / str(number), flip)
                if wrong is not None and _is_same(folder / str(number), folder / "whole"):
                    # The next update rounded it away: no rank holds anything else than it would have.
                    rounded += 1
                    continue
                trials[f"{number}, {flip}"], latest = wrong, max(latest, steps)
            clean = ranks(trained, str(folder / "clean"), None, {"train.steps": CLEAN[full]})
            trials["no false alarm"] = first_wrong((str(clean), lambda: [one["code"] for one in clean] == [0, 0]))
            share = max(one["share"] for one in ranks(trained, str(folder / "cnn"), None, IMAGES))
            trials["it costs little"] = first_wrong((f"{share:.2%} of the time", lambda: share <= MOST_SHARE))
    finally:
        ranks.stop()
    told = f"found after {latest} steps at most, at {share:.2%} of the time of a small CNN"
    return outcome(trials, f"{told}; {rounded} more were rounded away by the next step")


def _drawn(chance: random.Random, kind: str) -> dict[str, Any]:
    # The first bits of a float say how large it is: a weight of 1e38 ends the run by itself, and sooner.
    return {
        "kind": kind,
        "rank": chance.randrange(2),
        "step": chance.randint(2, 100),
        "parameter": chance.choice(["0.weight", "0.bias", "2.weight", "2.bias"]),
        "place": chance.random(),
        "bit": chance.randrange(24),
    }


def _found(ranks: Ranks, folder: Path, flip: dict[str, Any]) -> tuple[str | None, int]:
    found = ranks(trained, str(folder), flip, {})
    said = found[0]["said"]
    after = re.search(r"after step (\d+)", said)
    steps = int(after.group(1)) - flip["step"] + 1 if after else 0
    saved = rig.committed(folder)
    wrong = first_wrong(
        (f"exit codes {[(one['code'], one['said']) for one in found]}", lambda: _codes(found) == [GAVE_UP] * 2),
        (f"named: {said}", lambda: _name(flip) in said),
        (f"after {steps} steps", lambda: 0 < steps <= WITHIN),
        (f"not saved: {saved}", lambda: max(saved, default=0) < flip["step"]),
    )
    return wrong, steps


def _is_same(folder: Path, whole: Path) -> bool:
    """Whether a run came to its end, with every loss and every weight of the one without a flipped bit."""
    return (folder / "result.json").exists() and rig.ending(folder) == rig.ending(whole)


def _codes(found: list[dict[str, Any]]) -> list[int]:
    return [one["code"] for one in found]


def _name(flip: dict[str, Any]) -> str:
    words = {"weight": "the weight", "average": "the average of"}
    return f"{words.get(flip['kind'], flip['kind'] + ' of')} {flip['parameter']}"


class Images(Tiny):
    """A small CNN: the two numbers of a sample become a picture first."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 3 * 32 * 32),
            nn.Unflatten(1, (3, 32, 32)),
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2),
            nn.Flatten(),
            nn.Linear(64 * 6 * 6, 1),
        )


IMAGES = {"train.steps": 60, "train.batch_size": 16}


def trained(rank: int, folder: str, flip: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """A run on this rank: how it ended, and the share of its time that comparing takes every 50 steps."""
    mutants.apply(mutants.current())
    make_loop, check = fit.make_loop, Replicas.check
    compared: list[float] = []
    loops: list[Loop] = []

    def timed(self: Replicas, state: Any) -> None:
        began = time.perf_counter()
        check(self, state)
        compared.append(time.perf_counter() - began)

    def built(*given: Any, **named: Any) -> Loop:
        loops.append(make_loop(*given, **named))
        if flip is not None and rank == flip["rank"]:
            _flip_in(loops[-1], flip)
        return loops[-1]

    fit.make_loop, Replicas.check = built, timed  # type: ignore[method-assign]
    recipe = Path(f"{folder}-{rank}.yaml")
    recipe.write_text("task: tiny\n")
    found: dict[str, Any] = {"code": 0, "said": ""}
    try:
        task = Images if more is IMAGES or more == IMAGES else Tiny
        fit.fit(recipe, task=task, settings={**SETTINGS, **more, "run.dir": folder}, quiet=True)
    except HalfstepError as error:
        found = {"code": error.exit_code, "said": error.given}
    finally:
        fit.make_loop, Replicas.check = make_loop, check  # type: ignore[method-assign]
    share = statistics.median(compared) / (WITHIN * loops[-1].time_left.per_step) if compared else 0.0
    return {**found, "share": share}


def _flip_in(loop: Loop, flip: dict[str, Any]) -> None:
    step = loop.take_step

    def flipping(*given: Any, **named: Any) -> Any:
        report = step(*given, **named)
        if loop.stepper.counts.attempted == flip["step"]:
            tensor = _tensor(loop, flip).detach()
            place = int(flip["place"] * tensor.numel())
            tensor.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(1 << flip["bit"])
        return report

    loop.take_step = flipping  # type: ignore[method-assign]


def _tensor(loop: Loop, flip: dict[str, Any]) -> torch.Tensor:
    name, kind = flip["parameter"], flip["kind"]
    parameter = dict(loop.model.named_parameters())[name]
    if kind == "weight":
        return distributed.unwrap_local_tensor(parameter)
    if kind == "average":
        assert loop.stepper.ema is not None
        average: torch.Tensor = loop.stepper.ema.state_dict()["averages"][name]
        return average
    found: torch.Tensor = loop.parts.optimizer.state[parameter][kind]
    return found
