"""Explain the order in which a recipe would read its shards."""

from __future__ import annotations

from dataclasses import replace

from halfstep.data.choose_order import OrderFacts, choose_order, measure_nodes, measure_order
from halfstep.data.indexed import find_shards
from halfstep.data.layout import check_store_data, is_store_address, resolve_data_path
from halfstep.data.shard_index import find_index
from halfstep.data.shards import build_shard_set, resolve_training_folder
from halfstep.errors import BadData
from halfstep.recipe.sources import RawRecipe
from halfstep.runs.registry import find_task_class
from halfstep.runs.resolve import resolve_run_recipe

NODES = (1, 8, 64, 512)
"""Numbers of nodes for which the downloads of a set in a store are given."""


def explain_order(found: RawRecipe, folder: str) -> OrderFacts:
    """Return the order of a recipe with these shards on one device.

    Raises BadData if there are no shards or no index of them, and BadRecipe for a task that reads none.
    """
    recipe = resolve_run_recipe(found, {"data.name": "shards", "data.path": folder}).recipe
    is_stored, root = is_store_address(recipe.data.path), recipe.data.path
    if is_stored:
        check_store_data(recipe.data)
    else:
        root = resolve_training_folder(resolve_data_path(recipe.data.path))
    # Shards without an index would be read whole, which is too much for an explanation.
    if is_stored or find_index(root, build_shard_set(root)) is not None:
        source = find_task_class(recipe.task)(recipe).source("train")
        if (shards := find_shards(source)) is not None:
            batch = recipe.train.global_batch or recipe.train.batch_size * recipe.train.microbatches
            window = recipe.data.window
            facts = measure_order(choose_order(source, window, batch), source, shards, batch)
            if facts.order.name != "windows" or shards.is_local:
                return facts
            chosen = (
                (nodes, choose_order(source, window, batch, nodes, nodes)) for nodes in NODES if batch % nodes == 0
            )
            nodes = (measure_nodes(order, source, shards, batch, count) for count, order in chosen)
            return replace(facts, nodes=tuple(nodes))
    raise BadData(
        f"{root} has no index yet", allowed="shards with an index", do=f"halfstep data index {root}, then this again"
    )
