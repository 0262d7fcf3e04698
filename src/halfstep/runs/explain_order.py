"""Explain the order in which a recipe would read its shards."""

from __future__ import annotations

from halfstep.data.choose_order import OrderFacts, choose_order, order_facts
from halfstep.data.dataset import seal_of
from halfstep.data.layout import data_place
from halfstep.data.shard_index import existing_index
from halfstep.data.shards import shards_at
from halfstep.recipe.sources import RawRecipe
from halfstep.runs.registry import task_class
from halfstep.runs.resolve import resolved_recipe


def explain_order(found: RawRecipe, folder: str | None = None) -> OrderFacts | None:
    """Return the order of a recipe on one device, with its own data or another folder; None without an index.

    Raises BadData where there are no shards.
    """
    recipe = resolved_recipe(found, {"data.path": folder} if folder else {}).recipe
    place = data_place(recipe.data.path)
    root = place / "train" if (place / "train").is_dir() else place
    # Shards without an index would be read whole, which is too much for an explanation.
    if existing_index(root, shards_at(root)) is None:
        return None
    source = task_class(recipe.task)(recipe).source("train")
    batch = recipe.train.global_batch or recipe.train.batch_size * recipe.train.microbatches
    seal = seal_of(source)
    return order_facts(choose_order(source, recipe.data.window, batch), source, seal.shards, batch) if seal else None
