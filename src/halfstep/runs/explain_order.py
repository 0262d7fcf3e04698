"""Explain the order in which a recipe would read its shards."""

from __future__ import annotations

from halfstep.data.choose_order import OrderFacts, choose_order, order_facts
from halfstep.data.dataset import seal_of
from halfstep.data.layout import check_store_data, data_place, is_address
from halfstep.data.shard_index import existing_index
from halfstep.data.shards import shard_set_at, training_shards
from halfstep.errors import BadData
from halfstep.recipe.sources import RawRecipe
from halfstep.runs.registry import task_class
from halfstep.runs.resolve import resolved_recipe


def explain_order(found: RawRecipe, folder: str) -> OrderFacts:
    """Return the order of a recipe with these shards on one device.

    Raises BadData if there are no shards or no index of them, and BadRecipe for a task that reads none.
    """
    recipe = resolved_recipe(found, {"data.name": "shards", "data.path": folder}).recipe
    is_stored, root = is_address(recipe.data.path), recipe.data.path
    if is_stored:
        check_store_data(recipe.data)
    else:
        root = training_shards(data_place(recipe.data.path))
    # Shards without an index would be read whole, which is too much for an explanation.
    if is_stored or existing_index(root, shard_set_at(root)) is not None:
        source = task_class(recipe.task)(recipe).source("train")
        if (seal := seal_of(source)) is not None:
            batch = recipe.train.global_batch or recipe.train.batch_size * recipe.train.microbatches
            return order_facts(choose_order(source, recipe.data.window, batch), source, seal.shards, batch)
    raise BadData(
        f"{root} has no index yet", allowed="shards with an index", do=f"halfstep data index {root}, then this again"
    )
