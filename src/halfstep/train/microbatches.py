"""Divide the samples of a step into micro-batches for the ranks there are and the memory that they have."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfstep.errors import BadRecipe

BATCH, MICROBATCHES = "train.batch_size", "train.microbatches"


def choose_smaller_microbatches(batch: int, microbatches: int, at_most: int) -> dict[str, int]:
    """Return settings for the same step in smaller micro-batches: the largest divisor of `batch` up to `at_most`."""
    size = find_largest_divisor(batch, at_most)
    return {BATCH: size, MICROBATCHES: microbatches * batch // size}


def find_largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`; 1 where there is no other."""
    return next(one for one in range(max(at_most, 1), 0, -1) if number % one == 0)


def adapt_microbatches(recipe: Any, ranks: int, parts: int) -> Any:
    """Return the recipe with the micro-batches of these ranks, each taken in `parts`.

    The samples of a step are those of the recipe: of each rank, or of all ranks with `train.global_batch`. Raises
    BadRecipe where they cannot be divided by the ranks.
    """
    train = recipe.train
    if train.global_batch is None:
        size, number = train.batch_size // parts, train.microbatches * parts
    else:
        each = _compute_samples_per_rank(train.global_batch, ranks)
        size = find_largest_divisor(each, train.batch_size // parts)
        number = each // size
    return recipe.model_copy(update={"train": train.model_copy(update={"batch_size": size, "microbatches": number})})


def _compute_samples_per_rank(global_batch: int, ranks: int) -> int:
    each, rest = divmod(global_batch, ranks)
    if rest:
        near = find_largest_divisor(global_batch, ranks)
        raise BadRecipe(
            f"train.global_batch={global_batch} on {ranks} ranks",
            allowed="a number of samples that every rank gets an equal part of",
            do=f"use {near} rank{'s' * (near > 1)}, or train.global_batch={ranks * (each + 1)}",
        )
    return each


def describe_divided_microbatches(recipe: Any, parts: int, model: nn.Module) -> list[str]:
    """Return a line that says what smaller micro-batches change; none if they are the recipe's own."""
    if parts == 1:
        return []
    text = (
        f"memory ran out with larger micro-batches: a step takes the same samples, {recipe.train.batch_size} at a time"
    )
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        text += "; batch statistics are of fewer samples, which changes the numbers"
    return [text]
