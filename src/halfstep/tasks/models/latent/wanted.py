"""Conditions to draw samples for: classes in turn, or what the first samples of a source were asked for with."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import BadData
from halfstep.tasks.models.latent.conditions import Condition
from halfstep.train.data.source import BadSample, Source, Transform, without_image


def classes_in_turn(classes: int, count: int, device: torch.device) -> Condition:
    """0, 1, 2 and so on, and again from 0: a grid with a column for each class has one class in each."""
    return Condition.of(torch.arange(count, device=device) % classes)


def first_conditions(source: Source, ready: Transform, part: str, count: int, device: torch.device) -> Condition:
    """Those of the first samples that can be read, and again from the first where there are fewer."""
    found: list[Tensor] = []
    for index in range(len(source)):
        if len(found) == count:
            break
        try:
            found.append(ready(without_image(source, index))[part])
        except BadSample:
            continue
    if not found:
        raise BadData(
            "no validation sample can be read, and samples are drawn for their conditions",
            allowed="at least one",
            do="check data.path and data.val in the run's recipe.yaml",
        )
    return Condition.of(torch.stack([found[n % len(found)] for n in range(count)]).to(device))
