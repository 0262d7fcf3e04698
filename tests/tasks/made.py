"""Tasks as a recipe would make them, and batches as a loader would."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from halfstep.data.dataset import Sample
from halfstep.runs.registry import find_task_class
from halfstep.step.loss import Counted
from halfstep.train.task import Split, Task

PACKAGES = {"text": ("transformers", "tokenizers")}
"""What the tests of a task do not run without."""


def made(name: str, **sections: dict[str, Any]) -> Task:
    """The task's tiny recipe, with some fields changed."""
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    kind = find_task_class(name)
    raw = {"task": name, **{key: {**values, **sections.get(key, {})} for key, values in kind.tiny.items()}}
    return kind(kind.schema.model_validate(raw))


def batch_of(task: Task, split: Split, size: int = 4) -> Sample:
    source = task.source(split)
    return task.collate(split, [task.transform(split, source.read(i % len(source))) for i in range(size)])


def mean_loss(loss: Any) -> Tensor:
    """A loss of any form as the mean that is reported."""
    found: Tensor = loss.sum / loss.count if isinstance(loss, Counted) else loss
    return found
