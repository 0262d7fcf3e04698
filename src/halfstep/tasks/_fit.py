"""`halfstep.fit`: a run from Python, and what `halfstep train` calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from halfstep import world
from halfstep.errors import WrongUse
from halfstep.tasks._folder import task_class
from halfstep.train.journal.journal import Journal, Listener
from halfstep.train.journal.listeners import listeners
from halfstep.train.recipe.overrides import Override, key_for, read_flags
from halfstep.train.recipe.resolve import Resolved, resolve
from halfstep.train.recipe.sources import Found, read_recipe
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.recipe.written import to_yaml
from halfstep.train.run import Run, train
from halfstep.train.run_folder import RunFolder, open_run
from halfstep.train.start import decided_once, together
from halfstep.train.task import Task

Settings = Mapping[str, Any] | Iterable[str]
"""`{"train.batch_size": 4}`, or as on the command line: `["train.batch_size=4", "--bf16"]`."""


def fit(
    recipe: str | Path,
    *,
    task: Task | type[Task] | None = None,
    precision: str | None = None,
    settings: Settings = (),
    new: bool = False,
    quiet: bool = False,
    command: str = "halfstep.fit",
    notes: Sequence[str] = (),
) -> Run:
    """Train a recipe, by name or path, and return the finished run.

    `task` is a task of your own, `settings` changes the recipe, `new` numbers another folder where one is taken,
    `quiet` writes to the run's folder only.
    """
    found = read_recipe(str(recipe))
    kind = task_of(task, found)
    resolved = resolved_recipe(found, kind, precision, settings)
    with together():
        text = decided_once(lambda: to_yaml(_opened(resolved, new).recipe))
        chosen = kind.schema.model_validate(read_yaml(text, found.label))
        folder = Path(chosen.run.dir)
        journal = Journal(_listeners(folder, chosen, quiet))
        try:
            job = _ready(task, kind, chosen)
            told = [*notes, *resolved.notes]
            return train(job, chosen, folder, journal, label=found.label, command=command, notes=told)
        finally:
            journal.close()


def task_of(task: Task | type[Task] | None, found: Found) -> type[Task]:
    """The class of the task: the one given, or the one that the recipe names."""
    if task is None:
        named = found.raw.get("task")
        if not isinstance(named, str):
            raise WrongUse(f"{found.label} names no task", allowed="task: segmentation", do="add a line `task: NAME`")
        return task_class(named)
    return task if isinstance(task, type) else type(task)


def resolved_recipe(found: Found, kind: type[Task], precision: str | None, settings: Settings) -> Resolved:
    """The recipe with every setting in its place."""
    if isinstance(settings, Mapping):
        overrides = [Override(key_for(key, kind.schema), value) for key, value in settings.items()]
    else:
        overrides = read_flags(list(settings), kind.schema)
    if precision is not None:
        overrides.append(Override("precision", precision))
    return resolve(found.raw, kind.schema, overrides, found.label)


def _ready(task: Task | type[Task] | None, kind: type[Task], recipe: Any) -> Task:
    if not isinstance(task, Task):
        return kind(recipe)
    # An object that was made by hand keeps what else it holds, and begins again with this recipe.
    task.__init__(recipe)  # type: ignore[misc]
    return task


def _listeners(folder: Path, recipe: Any, quiet: bool) -> list[Listener]:
    if world.rank() > 0:
        return []
    return listeners(folder, tracker=recipe.run.tracker, console=None if quiet else Console(highlight=False))


def _opened(resolved: Resolved, new: bool) -> RunFolder:
    return open_run(resolved.recipe, resolved.label, new, drawn=resolved.drawn)
