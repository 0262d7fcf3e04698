"""A run from its first line to its last: everything is built, trained, judged and written down."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfstep import __version__, world
from halfstep.errors import Diverged, RanksDisagree, Stopped
from halfstep.guard.remedy.remedies import Remedies
from halfstep.precision import flags
from halfstep.train.checkpoint.generation import CHECKPOINTS
from halfstep.train.checkpoint.saver import Saver
from halfstep.train.giving_up import given_up
from halfstep.train.guarding import Guarding
from halfstep.train.journal import journal as events
from halfstep.train.journal.journal import Journal
from halfstep.train.journal.telemetry import Telemetry
from halfstep.train.keeping import Keeper
from halfstep.train.loaders import make_loaders
from halfstep.train.loop import Loop, planned_steps
from halfstep.train.measured import Measured
from halfstep.train.resuming import Resumed
from halfstep.train.setup import AnyRecipe, Parts, prepare, without_weights
from halfstep.train.start import device_of
from halfstep.train.stopping import Stopping
from halfstep.train.task import Task, Told, unheard
from halfstep.train.weights import digest, infinite_buffers

INTERRUPTED, FAILED, STOPPED, GAVE_UP = "interrupted", "failed", "stopped", "gave_up"


@dataclass(frozen=True)
class Run:
    """A run that came to its end."""

    dir: Path
    metrics: dict[str, float]
    """Of the last evaluation."""
    best: dict[str, Any]
    """The task's metric, its best value, and the epoch of it."""
    reason: str
    precision: str
    seconds: float
    steps: int
    skipped: dict[str, int] = field(default_factory=dict)


def train(
    loop: Loop, folder: Path, *, label: str, command: str, notes: list[str], resumed: Resumed | None = None
) -> Run:
    """Train what `make_loop` built, and leave everything in `folder`. Called by every process."""
    began, journal = time.perf_counter() - loop.journal.seconds, loop.journal
    loop.keeper.facts(loop.task)
    facts = _facts(loop)
    facts["notes"] = [*notes, *facts["notes"]]
    told = None if resumed is None else resumed.as_dict()
    journal.tell(events.START, label=label, dir=str(folder), command=command, resumed=told, **facts)
    reason: str = FAILED
    more: dict[str, Any] = {}
    try:
        if resumed is not None and resumed.changed:
            # Under its new settings, so that they need not be accepted again.
            loop.checkpoints.save()
            loop.checkpoints.finish()
        reason = loop.run()
        loop.checkpoints.finish()
        _same_weights(loop.parts, journal)
    except KeyboardInterrupt:
        reason = INTERRUPTED
        raise
    except Stopped:
        reason, more = STOPPED, {"signal": loop.stopping.asked, "checkpoint": loop.checkpoints.name}
        more["kept"] = loop.checkpoints.doubt
        raise
    except Diverged as error:
        reason, ending = GAVE_UP, given_up(loop, error, command)
        more = ending.as_dict()
        raise ending.error from error
    finally:
        loop.checkpoints.close()
        run = _ended(loop, folder, reason, time.perf_counter() - began)
        told = {key: getattr(run, key) for key in ("metrics", "best", "seconds", "steps", "skipped")}
        cures = loop.guarding.cures
        journal.tell(events.END, reason=reason, cures=[str(cure) for cure in cures.placed], **told, **more)
    loop.keeper.result({**_result(run, loop.parts), "cures": cures.as_dict()})
    return run


def make_loop(
    task: Task,
    recipe: AnyRecipe,
    folder: Path,
    journal: Journal,
    *,
    measured: Measured | None = None,
    cures: Remedies | None = None,
    stopping: Stopping | None = None,
    told: Told = unheard,
) -> Loop:
    """Everything built, and no step taken yet.

    `measured` is what an earlier launch of this run found out, and `cures` what its guard had placed; its checkpoint
    has the weights, too.
    """
    starting = recipe
    if measured is not None:
        starting = task.recipe = without_weights(recipe)
    device = device_of(recipe.train.device)
    loaders = make_loaders(task, recipe, device, measured.workers if measured else None)
    per_epoch = loaders.train.steps_per_epoch
    parts = prepare(
        task,
        starting,
        device,
        total=planned_steps(recipe, per_epoch),
        per_epoch=per_epoch,
        precision=measured.precision if measured else None,
        cures=cures,
        told=told,
    )
    parts.notes += loaders.notes
    options = recipe.checkpoint
    return Loop(
        task,
        recipe,
        parts,
        loaders.train,
        loaders.val,
        journal=journal,
        keeper=Keeper(folder, journal, recipe.run.pictures, infinite_buffers(parts.model)),
        telemetry=Telemetry(device).read,
        measured=measured or Measured(parts.choice.precision.name, parts.choice.reasons, loaders.workers),
        data=loaders.data,
        saver=Saver(folder / CHECKPOINTS, keep=options.keep, party=world.Party(), background=options.background),
        guarding=Guarding(parts.stepper, recipe.guard, journal, folder, cures),
        stopping=stopping or Stopping(),
    )


def _facts(loop: Loop) -> dict[str, Any]:
    """What a person wants to see before the first step."""
    task, train, choice, device = loop.task, loop.recipe.train, loop.parts.choice, loop.stepper.device
    parameters, samples = list(loop.model.parameters()), len(loop.train.samples)
    return {
        "recipe": loop.recipe.model_dump(mode="json"),
        "notes": loop.parts.notes,
        "steps": loop.planned,
        "epochs": loop.epochs,
        "precision": {
            # A resumed run takes what `auto` came to by its name.
            "asked": loop.recipe.precision,
            "took": choice.took,
            "chosen": choice.precision.name,
            "summary": choice.precision.summary,
            "reasons": list(choice.reasons),
        },
        "device": {"name": choice.device.name, "place": str(device)},
        "batch": {
            "per_device": train.batch_size,
            "devices": world.size(),
            "microbatches": train.microbatches,
            "total": loop.train.share.window,
        },
        "steps_per_epoch": loop.train.steps_per_epoch,
        "samples": {"train": samples, "val": len(loop.val.samples)},
        "repeats": loop.train.share.repeats(samples),
        "parameters": {
            "total": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        },
        "flags": flags.read_flags(),
        "versions": {"halfstep": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "metric": {"name": task.metric, "higher_is_better": task.higher_is_better},
        "findings": [finding.as_dict() for finding in loop.stepper.findings],
    }


def _ended(loop: Loop, folder: Path, reason: str, seconds: float) -> Run:
    counts = loop.stepper.counts
    return Run(
        dir=folder,
        metrics=loop.latest,
        best=loop.best,
        reason=reason,
        precision=loop.parts.choice.precision.name,
        seconds=seconds,
        steps=counts.applied,
        skipped=dict(counts.skipped),
    )


def _result(run: Run, parts: Parts) -> dict[str, Any]:
    observed = parts.stepper.observed
    return {
        "reason": run.reason,
        "metrics": run.metrics,
        "best": run.best,
        "precision": run.precision,
        "observed": None if observed is None else {"expected": observed.expected, "share": observed.share},
        "seconds": run.seconds,
        "steps": run.steps,
        "skipped": run.skipped,
        "weights": digest(parts.model),
    }


def _same_weights(parts: Parts, journal: Journal) -> None:
    """Processes that trained one model must have the same weights, to the bit."""
    if world.size() == 1:
        return
    digests = world.from_all(digest(parts.model))
    if len(set(digests)) > 1:
        raise RanksDisagree(
            f"the weights differ between processes at the end: {', '.join(d[:12] for d in digests)}",
            allowed="the same weights on every process",
            do="report this with the recipe: every step was checked, so this should not happen",
        )
    text = f"weights are bitwise equal on {len(digests)} processes (sha256 {digests[0][:16]})"
    journal.tell(events.NOTE, text=text, level="info")
