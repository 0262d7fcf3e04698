"""The loop of a run, built again from its folder as often as it is asked for; nothing of the folder is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halfstep.guard.remedy.remedies import Remedies
from halfstep.tasks._finished import checked, recipe_in
from halfstep.tasks._folder import task_class
from halfstep.train.journal.journal import Journal
from halfstep.train.loop import Loop
from halfstep.train.measured import Measured
from halfstep.train.proof import Build
from halfstep.train.recipe.sources import read_recipe
from halfstep.train.run import make_loop
from halfstep.train.run_folder import RECIPE
from halfstep.train.task import Task


def rebuilding(folder: Path, own: Callable[[], type[Task]] | None) -> Build:
    """A function that builds everything of the run in `folder` anew, to train in another folder.

    `own` gives the class of a person's own task, and gives it anew each time: what its file keeps to itself is lost
    when a run ends, and must be lost here.
    """
    found = read_recipe(str(recipe_in(folder)))

    def build(where: Path, measured: Measured | None, cures: Remedies | None) -> Loop:
        kind = own() if own else task_class(str(found.raw.get("task")))
        recipe = checked(found.raw, kind.schema, folder / RECIPE)
        return make_loop(kind(recipe), recipe, where, Journal(), measured=measured, cures=cures)

    return build
