"""`halfstep.fit`: a run from Python; and `launch`, which `halfstep train` calls with a recipe that it has checked."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from halfstep import world
from halfstep.tasks._folder import task_class
from halfstep.tasks._resolving import Settings, resolved_recipe
from halfstep.train.journal.journal import Journal, Listener
from halfstep.train.journal.listeners import listeners
from halfstep.train.recipe.resolve import Resolved
from halfstep.train.recipe.sources import read_recipe
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.recipe.written import to_yaml
from halfstep.train.run import Run, make_loop, train
from halfstep.train.run_folder import RunFolder, open_run
from halfstep.train.start import decided_once, generators_kept, together
from halfstep.train.task import Task


def fit(
    recipe: str | Path,
    *,
    task: Task | type[Task] | None = None,
    precision: str | None = None,
    settings: Settings = (),
    new: bool = False,
    quiet: bool = False,
) -> Run:
    """Train a recipe, by name or path, and return the finished run.

    `task` is a task of your own, `settings` changes the recipe, `new` numbers another folder where one is taken,
    `quiet` writes to the run's folder only.
    """
    resolved = resolved_recipe(read_recipe(str(recipe)), _with_precision(settings, precision), schema=_schema(task))
    return launch(resolved, task=task, new=new, quiet=quiet, command="halfstep.fit")


def launch(
    resolved: Resolved,
    *,
    task: Task | type[Task] | None,
    new: bool,
    quiet: bool,
    command: str,
    notes: Sequence[str] = (),
) -> Run:
    """Train a recipe that is complete, on every process that torchrun started."""
    kind = task_class(resolved.recipe.task) if task is None else _class(task)
    with together(), generators_kept():
        text = decided_once(lambda: to_yaml(_opened(resolved, new).recipe))
        recipe = kind.schema.model_validate(read_yaml(text, resolved.label))
        folder = Path(recipe.run.dir)
        journal = Journal(_listeners(folder, recipe, quiet))
        try:
            with _gone_if_it_cannot_begin(folder):
                loop = make_loop(_ready(task, kind, recipe), recipe, folder, journal)
            told = [*notes, *resolved.notes]
            return train(loop, folder, label=resolved.label, command=command, notes=told)
        finally:
            journal.close()


@contextmanager
def _gone_if_it_cannot_begin(folder: Path) -> Iterator[None]:
    """A run that never took a step leaves no folder, so that the command can be mended and typed again."""
    try:
        yield
    except BaseException:
        if world.rank() == 0:
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


def _listeners(folder: Path, recipe: Any, quiet: bool) -> list[Listener]:
    if world.rank() > 0:
        return []
    return listeners(folder, tracker=recipe.run.tracker, console=None if quiet else Console(highlight=False))


def _opened(resolved: Resolved, new: bool) -> RunFolder:
    return open_run(resolved.recipe, resolved.label, new, drawn=resolved.drawn)
