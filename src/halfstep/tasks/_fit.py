"""`halfstep.fit`: a run from Python; and `launch`, which `halfstep train` calls with a recipe that it has checked."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from halfstep import world
from halfstep.progress import progress
from halfstep.tasks._folder import task_class
from halfstep.tasks._resolving import Settings, resolved_recipe
from halfstep.train.checkpoint.generation import CHECKPOINTS
from halfstep.train.journal.journal import Journal, Listener
from halfstep.train.journal.listeners import listeners
from halfstep.train.lock import FolderLock
from halfstep.train.recipe.changes import DATA, RECIPE
from halfstep.train.recipe.resolve import Resolved
from halfstep.train.recipe.sources import read_recipe
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.recipe.written import to_yaml
from halfstep.train.resuming import Resumed, find, take_up
from halfstep.train.run import Run, make_loop, train
from halfstep.train.run_folder import NEW, UNFINISHED, keep_recipe, open_run
from halfstep.train.start import decided_once, generators_kept, together
from halfstep.train.status import status_kept
from halfstep.train.stopping import Stopping
from halfstep.train.task import Task, Told, unheard


def fit(
    recipe: str | Path,
    *,
    task: Task | type[Task] | None = None,
    precision: str | None = None,
    settings: Settings = (),
    new: bool = False,
    quiet: bool = False,
    accept_data_change: bool = False,
    accept_recipe_change: bool = False,
) -> Run:
    """Train a recipe, by name or path, and return the finished run; go on with it where it was interrupted.

    `task` is a task of your own, `settings` changes the recipe, `new` numbers another folder where one is taken,
    `quiet` writes to the run's folder only. A run goes on with the data and the recipe that it was begun with, unless
    a change of them is accepted.
    """
    accepted = [name for name, given in {DATA: accept_data_change, RECIPE: accept_recipe_change}.items() if given]
    resolved = resolved_recipe(read_recipe(str(recipe)), _with_precision(settings, precision), schema=_schema(task))
    return launch(resolved, task=task, new=new, quiet=quiet, command="halfstep.fit", accepted=accepted)


def launch(
    resolved: Resolved,
    *,
    task: Task | type[Task] | None,
    new: bool,
    quiet: bool,
    command: str,
    notes: Sequence[str] = (),
    accepted: Collection[str] = (),
) -> Run:
    """Train a complete recipe, on every process that torchrun started; or go on where an earlier launch ended."""
    kind = task_class(resolved.recipe.task) if task is None else _class(task)
    with Stopping() as stopping, together(), generators_kept(), _opened(resolved, new, accepted) as opened:
        recipe = kind.schema.model_validate(read_yaml(opened["recipe"], resolved.label))
        folder, journal = Path(recipe.run.dir), Journal()
        with status_kept(folder), contextlib.closing(journal):
            with _gone_if_it_cannot_begin(folder, opened["state"]):
                found = find(folder) if opened["state"] == UNFINISHED else None
                with _watched(quiet) as told:
                    loop = make_loop(
                        _ready(task, kind, recipe),
                        recipe,
                        folder,
                        journal,
                        measured=found.measured_for(recipe) if found else None,
                        cures=found.cures_for(recipe) if found else None,
                        stopping=stopping,
                        told=told,
                    )
                resumed = take_up(loop, found, folder, accepted) if opened["state"] == UNFINISHED else None
                journal.begin(_listeners(folder, recipe, quiet, resumed), resumed.seconds if resumed else 0.0)
            if world.rank() == 0:
                keep_recipe(folder, recipe)  # not before it was found to fit
            heard = [*notes, *resolved.notes]
            return train(loop, folder, label=resolved.label, command=command, notes=heard, resumed=resumed)


@contextmanager
def _opened(resolved: Resolved, new: bool, accepted: Collection[str]) -> Iterator[dict[str, Any]]:
    """The run's folder, opened and locked by rank 0 for all."""
    held: list[FolderLock] = []

    def open_it() -> str:
        opened = open_run(resolved.recipe, resolved.label, new, drawn=resolved.drawn, accepted=accepted)
        held.append(opened.lock)
        return json.dumps({"recipe": to_yaml(opened.recipe), "state": opened.state})

    try:
        yield json.loads(decided_once(open_it))
    finally:
        for one in held:
            one.release()


@contextmanager
def _watched(quiet: bool) -> Iterator[Told]:
    """A bar from the first word on: most tasks have nothing to get ready."""
    with contextlib.ExitStack() as stack:
        bars: list[Told] = []

        def told(done: int, of: int) -> None:
            if not bars:
                bars.append(stack.enter_context(progress("getting ready", "samples")))
            bars[0](done, of)

        yield unheard if quiet or world.rank() > 0 else told


@contextmanager
def _gone_if_it_cannot_begin(folder: Path, state: str) -> Iterator[None]:
    """A run that never began leaves no folder, so that the command can be mended and typed again."""
    try:
        yield
    except BaseException:
        if world.rank() == 0 and state == NEW and not (folder / CHECKPOINTS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _class(task: Task | type[Task]) -> type[Task]:
    return task if isinstance(task, type) else type(task)


def _schema(task: Task | type[Task] | None) -> Any:
    return None if task is None else _class(task).schema


def _with_precision(settings: Settings, precision: str | None) -> Settings:
    if precision is None:
        return settings
    if isinstance(settings, Mapping):
        return {**settings, "precision": precision}
    return [*settings, f"precision={precision}"]


def _ready(task: Task | type[Task] | None, kind: type[Task], recipe: Any) -> Task:
    if not isinstance(task, Task):
        return kind(recipe)
    given = copy.copy(task)
    given.begin(recipe)
    return given


def _listeners(folder: Path, recipe: Any, quiet: bool, resumed: Resumed | None) -> list[Listener]:
    if world.rank() > 0:
        return []
    console = None if quiet else Console(highlight=False)
    return listeners(
        folder, tracker=recipe.run.tracker, console=console, resumed_at=resumed.attempt if resumed else None
    )
