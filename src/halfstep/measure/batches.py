"""Inspect, resize and move batches of any structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.errors import WrongUse
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.step.to_device import move_to_device


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order."""
    return [tensor for leaf in pytree.tree_leaves(batch) for _, tensor in iterate_tensor_leaves(leaf)]


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with its tensors changed; objects of a class that hold some are copied if they can be."""

    def changed(leaf: Any) -> Any:
        held = {id(tensor): change(tensor) for _, tensor in iterate_tensor_leaves(leaf)}
        if isinstance(leaf, Tensor):
            return held[id(leaf)]
        try:
            # deepcopy does not copy objects in its memo.
            return copy.deepcopy(leaf, {**held}) if held else leaf
        except Exception:  # it holds an open file, a lock, a generator
            return leaf

    return pytree.tree_map(changed, batch)


def sum_storage_bytes(held: Iterable[Tensor]) -> int:
    """Return the total bytes of the given tensors; storage shared by several of them counts once."""
    # Storages are compared by `_cdata`: fake tensors have no data_ptr().
    storages = [tensor.untyped_storage() for tensor in held]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def count_samples(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one.

    Raises `WrongUse` for a batch of 0 samples, and for one without a tensor that has a dimension.
    """
    for tensor in list_tensors(batch):
        if tensor.dim() and not tensor.shape[0]:
            raise WrongUse(
                f"a batch of 0 samples: its first tensor is of shape {tuple(tensor.shape)}",
                allowed="1 sample or more along the first dimension",
                do="return (model, loss_fn, batch) with such a batch",
            )
        if tensor.dim():
            return int(tensor.shape[0])
    raise WrongUse(
        f"a batch of type {type(batch).__name__} without a tensor that has a dimension",
        allowed="tensors, or tuples, lists, dicts and objects of them, with samples along their first dimension",
        do="return (model, loss_fn, batch) with such a batch",
    )


def describe_sample_tensors(batch: Any) -> list[str]:
    """Return the names and shapes of the tensors that `resize_batch` changes: those as long as the first one."""
    size = count_samples(batch)
    found = [
        (pytree.keystr(path) + end, t)
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        for end, t in iterate_tensor_leaves(leaf)
    ]
    return [f"batch{path} {tuple(each.shape)}" for path, each in found if each.dim() and each.shape[0] == size]


def resize_batch(batch: Any, size: int) -> Any:
    """Return the batch with `size` samples: the first ones, or all of them repeated. Other tensors are unchanged."""
    now = count_samples(batch)
    if now == size:
        return batch

    def taken(tensor: Tensor) -> Tensor:
        # A tensor of another length is not per sample, such as class weights.
        if not tensor.dim() or tensor.shape[0] != now:
            return tensor
        # Real samples are repeated: made-up values might be invalid as labels or indices.
        return tensor[torch.arange(size, device=tensor.device) % now]

    return map_tensors(batch, taken)


def move_batch(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Return the batch on `device`, with images in channels_last layout if `channels_last`."""
    return map_tensors(batch, lambda tensor: move_to_device(tensor, device, channels_last))
