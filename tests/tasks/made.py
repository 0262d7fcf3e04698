"""Tasks as a recipe would make them, and batches as a loader would."""

from __future__ import annotations

from typing import Any

from halfstep.data.dataset import Sample
from halfstep.runs.registry import task_class
from halfstep.train.task import Split, Task


def made(name: str, **sections: dict[str, Any]) -> Task:
    """The task's tiny recipe, with some fields changed."""
    kind = task_class(name)
    raw = {"task": name, **{key: {**values, **sections.get(key, {})} for key, values in kind.tiny.items()}}
    return kind(kind.schema.model_validate(raw))


def batch_of(task: Task, split: Split, size: int = 4) -> Sample:
    source = task.source(split)
    return task.collate(split, [task.transform(split, source.read(i % len(source))) for i in range(size)])
