"""Divide the samples of a step into micro-batches that fit into memory; the samples of a step stay the same."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

BATCH, MICROBATCHES = "train.batch_size", "train.microbatches"


def smaller_microbatches(batch: int, microbatches: int, at_most: int) -> dict[str, Any]:
    """Return settings for the same step in smaller micro-batches: the largest divisor of `batch` up to `at_most`."""
    size = largest_divisor(batch, at_most)
    return {BATCH: size, MICROBATCHES: microbatches * batch // size}


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`; 1 where there is no other."""
    return next(one for one in range(max(at_most, 1), 0, -1) if number % one == 0)


def divided(recipe: Any, by: int) -> Any:
    """Return the recipe with each micro-batch in `by` parts, and as many samples in a step as before."""
    size, number = recipe.train.batch_size // by, recipe.train.microbatches * by
    train = recipe.train.model_copy(update={"batch_size": size, "microbatches": number})
    return recipe.model_copy(update={"train": train})


def division_notes(recipe: Any, by: int, model: nn.Module) -> list[str]:
    """Return a line that says what a divided recipe changes; none where it was not divided."""
    if by == 1:
        return []
    size = recipe.train.batch_size
    text = f"memory did not suffice for micro-batches of {size * by}: a step takes the same samples, {size} at a time"
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        text += "; batch statistics are of fewer samples, which changes the numbers"
    return [text]
