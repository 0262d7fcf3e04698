"""A checkpoint of another model, optimizer or metric than that of the run which it is to go on in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import rig
from faults.judged import Compared
from faults.outcome import Outcome
from faults.wrong_pairs import PAIRS, STEPS, Kind, loop_of, saved_by
from halfstep.errors import HalfstepError
from halfstep.recipe.changes import RECIPE
from halfstep.train.loop import Loop
from halfstep.train.process_group import preserve_rng
from halfstep.train.resume import find_checkpoint, resume_from
from halfstep.train.state import State
from tests.support.digest import digest_of

ID = "F29"
WHAT = "a checkpoint that does not fit is refused with the differences, and the live run keeps every bit"
MOST_LINES = 20
ACCEPTABLE = ("another schedule", "an island")
"""Pairs that go on where a change of the recipe is accepted; all others are refused even then."""


def run(full: bool) -> Outcome:
    """In the full form both ways round: what was the wrong one saves, and goes on."""
    checks: dict[str, str] = {}
    compared = Compared()
    with rig.scratch() as folder, preserve_rng():
        for name, (saved, live) in PAIRS.items():
            accepted = () if name in ACCEPTABLE else (RECIPE,)
            checks[name] = refused(folder / name, saved, live, accepted, compared)
            if full:
                checks[f"{name}, the other way"] = refused(folder / f"not {name}", live, saved, accepted, compared)
        checks |= _accepted(folder)
    wrong = [f"{name}: {text}" for name, text in checks.items() if text]
    return Outcome(len(checks) - len(wrong), len(checks), wrong[0] if wrong else str(compared))


def refused(folder: Path, saved: Kind, live: Kind, accepted: tuple[str, ...], compared: Compared) -> str:
    """What went wrong when a run was to go on from the checkpoint of another; nothing if it was refused well."""
    saved_by(saved, folder)
    loop = loop_of(live, folder)
    before = _digest(loop)
    try:
        _go_on(loop, folder, accepted)
    except HalfstepError as error:
        lines = [line for line in str(error).split("\n") if line.startswith("    ")]
        said = "" if error.exit_code == 79 else f"code {error.exit_code}"
        said += "" if len(lines) <= MOST_LINES and error.do else f"{len(lines)} lines"
        return said + ("" if compared.counted(_digest(loop) == before) else "the live run was changed")
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "not refused"


def _go_on(loop: Loop, folder: Path, accepted: tuple[str, ...]) -> None:
    found = find_checkpoint(folder)
    assert found is not None
    resume_from(loop, found, folder, accepted)


def _digest(loop: Loop) -> str:
    """Model, optimizer, generators and everything else that a checkpoint has."""
    state = State.of(loop.live)
    return digest_of(*(getattr(state, name) for name in vars(state) if name != "position"), vars(loop.progress))


# -- what was accepted is used ------------------------------------------------------------------------------------


FP16 = {"precision": "fp16", "train.ema": 0.9}
SETTINGS: dict[str, dict[str, Any]] = {
    "a new rate": {"optimizer.lr": 0.002},
    "a new momentum": {"optimizer.momentum": 0.5},
    "a new decay": {"optimizer.weight_decay": 0.3},
    "a longer schedule": {"train.steps": 900},
    "a longer warm-up": {"schedule.warmup_steps": 40},
    "another schedule, accepted": {"schedule.name": "step", "schedule.every_epochs": 1},
    "another average": {"train.ema": 0.5},
    "another growth": {"loss_scale.growth_interval": 7},
    "another precision": {"precision": "fp32"},
}


def _accepted(folder: Path) -> Iterator[tuple[str, str]]:
    """The classic defect: the settings that were saved come back with the state, and the new ones are never used."""
    saved_by(Kind(settings=FP16), folder / "settings")
    return ((name, _used(folder / "settings", settings)) for name, settings in SETTINGS.items())


def _used(folder: Path, settings: dict[str, Any]) -> str:
    kind = Kind(settings={**FP16, **settings})
    found = find_checkpoint(folder)
    assert found is not None
    loop, fresh = loop_of(kind, folder), loop_of(kind, folder)
    resume_from(loop, found, folder, (RECIPE,))
    now, wanted = State.of(loop.live), State.of(fresh.live)
    rates = [fresh.parts.schedule.base_lrs[0] * fresh.parts.shape(loop.stepper.counts.applied)]
    checks = {
        "the rate": [group["lr"] for group in loop.parts.optimizer.param_groups[:1]] == rates,
        "a setting": _settings(now) == _settings(wanted),
        "the place": loop.stepper.counts.attempted == STEPS and loop.progress.attempts == STEPS,
        "what was learned": digest_of(now.weights) == digest_of(found.state.weights)
        and digest_of(now.optimizers["loss"]["state"]) == digest_of(found.state.optimizers["loss"]["state"]),
    }
    return ", ".join(name for name, good in checks.items() if not good)


def _settings(state: State) -> Any:
    """All that a person sets, of every component."""
    groups = [{**group, "lr": None} for group in state.optimizers["loss"]["param_groups"]]
    scale = {k: v for k, v in state.loss_scales["loss"]["scale"].items() if k not in ("scale", "_growth_tracker")}
    decay = (state.ema or {}).get("decay")
    schedule = state.lr_schedulers["loss"]
    return [groups, scale, decay, schedule["lr_lambdas"], schedule["base_lrs"], state.recipe, state.precision["name"]]
