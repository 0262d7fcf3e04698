"""The JSON schema of every task."""

from __future__ import annotations

from typing import Any


def task_schemas() -> dict[str, dict[str, Any]]:
    """By the name of the task."""
    from halfstep.tasks._folder import task_names, task_schema
    from halfstep.train.recipe.explain import json_schema

    return {name: json_schema(task_schema(name)) for name in task_names()}
