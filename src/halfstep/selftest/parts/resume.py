"""A run is saved half-way and resumed by a new build: its end is that of a run that nothing interrupts."""

from __future__ import annotations

from pathlib import Path

from halfstep.guard.repair.remedies import Remedies
from halfstep.journal.events import Journal
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import find_task_class
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.selftest.part import PartContext, PartResult, require
from halfstep.train.environment import AutoChoices
from halfstep.train.loop import Loop
from halfstep.train.resume_proof import prove_exact_resume
from halfstep.train.run import make_loop

STEPS = 8
_RECIPE = "segmentation_tiny"
_SETTINGS = {"train.steps": 4 * STEPS, "train.batch_size": 4, "train.num_workers": 0, "train.ema": 0.9}
_SETTINGS |= {"data.samples": 32, "model.width": 4, "model.depth": 1, "schedule.warmup_steps": 3}


def check(place: PartContext) -> PartResult:
    """Compare 8 + 8 steps with 16, on the images that are drawn by a program."""
    settings = {**_SETTINGS, "train.device": str(place.device), "precision": place.chosen().name}
    recipe = resolve_run_recipe(read_recipe(_RECIPE), settings).recipe

    def build(folder: Path, auto_choices: AutoChoices | None, remedies: Remedies | None) -> Loop:
        task = find_task_class(recipe.task)(recipe)
        return make_loop(task, recipe, folder, Journal(), auto_choices=auto_choices, remedies=remedies)

    proof = prove_exact_resume(build, [], STEPS, place.written("resume"))
    first = next((str(one) for one in (proof.loss, proof.state) if one is not None), "")
    require(proof.equal, f"{STEPS} + {STEPS} steps are not {2 * STEPS}: {first}")
    figures = {"tensors": proof.tensors, "steps": 2 * STEPS, "saved_at": STEPS}
    return PartResult(f"{STEPS} + {STEPS} = {2 * STEPS} steps, {proof.tensors} tensors bitwise", figures)
