"""A small run in a process of its own, to be killed, starved, signaled and started again."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torchmetrics  # noqa: F401

import halfstep
import halfstep.journal.curves
import halfstep.runs.fit
from faults import mutants
from halfstep.checkpoint import commit
from halfstep.checkpoint.paths import Disk
from halfstep.errors import HalfstepError
from halfstep.train.status import resolve_exit_code
from tests.support.tiny_task import Tiny

RECIPE: dict[str, Any] = {
    "task": "tiny",
    "precision": "fp32",
    "model.batchnorm": True,
    "data.samples": 80,
    "optimizer.lr": 0.01,
    "schedule.warmup_steps": 5,
    "train.steps": 300,
    "train.batch_size": 8,
    "train.num_workers": 0,
    "train.seed": 11,
    "train.ema": 0.9,
    "checkpoint.every_steps": 3,
    "run.log_every": 5,
    "run.pictures": 0,
}
"""Three hundred steps of a millisecond or two, thirty epochs, and a save every third step."""


def run(
    folder: str,
    settings: Mapping[str, Any] = {},
    *,
    disk: Disk | None = None,
    mutant: str | None = None,
    task: type[Tiny] = Tiny,
    before: Callable[[], None] | None = None,
    arguments: Mapping[str, Any] = {},
) -> None:
    """Train, or go on, in `folder`; the process ends with the exit code that the command would have.

    `before` is what a row does to the process first.
    """
    torch.set_num_threads(1)
    # Curves take most of the time of so small a run, and no row is about them.
    halfstep.journal.curves.CurvesListener._draw = lambda curves: None  # type: ignore[method-assign]
    # What the server that started this process used is no choice of the run.
    multiprocessing.set_start_method("fork", force=True)
    mutants.apply(mutant)
    if before is not None:
        before()
    if disk is not None:
        commit.Disk = lambda: disk  # type: ignore[assignment, misc]
    recipe, said = own_file(folder, ".yaml"), own_file(folder, ".err")
    recipe.write_text("task: tiny\n")
    try:
        halfstep.fit(recipe, task=task, settings={**RECIPE, "run.dir": folder, **settings}, quiet=True, **arguments)
    except Exception as error:
        said.write_text(str(error) if isinstance(error, HalfstepError) else traceback.format_exc())
        sys.exit(resolve_exit_code(error))


def run_rank(environment: Mapping[str, str], folder: str, settings: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Be one of several ranks: with the variables that torchrun would set, and then as `run`."""
    os.environ.update(environment)
    run(folder, settings, **more)


def own_file(folder: str | Path, suffix: str, rank: int | None = None) -> Path:
    """A file beside a run's folder; each rank has its own."""
    number = os.environ.get("RANK") if rank is None else str(rank)
    return Path(f"{folder}{suffix}" if number is None else f"{folder}-{number}{suffix}")
