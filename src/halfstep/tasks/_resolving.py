"""From a recipe and a person's settings to one complete recipe. Loads no torch: a wrong word must not wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from halfstep.errors import WrongUse
from halfstep.tasks._folder import task_schema
from halfstep.train.recipe.overrides import Override, key_for, read_flags
from halfstep.train.recipe.resolve import Resolved, resolve
from halfstep.train.recipe.sources import Found

Settings = Mapping[str, Any] | Iterable[str]
"""`{"train.batch_size": 4}`, or as on the command line: `["train.batch_size=4", "--bf16"]`."""


def resolved_recipe(found: Found, settings: Settings = (), *, schema: Any = None) -> Resolved:
    """The recipe with every setting in its place; `schema` is that of a task of one's own."""
    schema = schema or task_schema(_named_task(found))
    if isinstance(settings, Mapping):
        overrides = [Override(key_for(key, schema), value) for key, value in settings.items()]
    else:
        overrides = read_flags(list(settings), schema)
    return resolve(found.raw, schema, overrides, found.label)


def _named_task(found: Found) -> str:
    named = found.raw.get("task")
    if not isinstance(named, str):
        raise WrongUse(f"{found.label} names no task", allowed="task: segmentation", do="add a line `task: NAME`")
    return named
