"""A batch of any shape: its samples, the same with another number of them, what it takes and where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.errors import WrongUse
from halfstep.train.placing import moved


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def bytes_of(held: Iterable[Tensor]) -> int:
    """Of tensors together; memory that several of them share counts once."""
    # Told apart by the storages themselves: fake tensors have no address.
    storages = [tensor.untyped_storage() for tensor in held]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def size_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has any."""
    for tensor in tensors(batch):
        if tensor.dim() and not tensor.shape[0]:
            raise WrongUse(
                f"a batch of 0 samples: its first tensor is of shape {tuple(tensor.shape)}",
                allowed="1 sample or more along the first dimension",
                do="return (model, loss_fn, batch) with such a batch",
            )
        if tensor.dim():
            return int(tensor.shape[0])
    raise WrongUse(
        f"a batch of type {type(batch).__name__} that holds no tensor with a dimension",
        allowed="tensors, or tuples, lists and dicts of them, with samples along their first dimension",
        do="return (model, loss_fn, batch) with such a batch",
    )


def taken_as_samples(batch: Any) -> list[str]:
    """The tensors of a batch that another size changes, with their shapes: those as long as the first one."""
    size = size_of(batch)
    found = pytree.tree_flatten_with_path(batch)[0]
    rows = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size]
    return [f"batch{pytree.keystr(path)} {tuple(leaf.shape)}" for path, leaf in rows]


def resized(batch: Any, size: int) -> Any:
    """The batch with `size` samples: the first ones, or all of them again and again. Other tensors stay as they are."""
    now = size_of(batch)
    if now == size:
        return batch

    def taken(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != now:
            return tensor
        return tensor[torch.arange(size, device=tensor.device) % now]

    return pytree.tree_map_only(Tensor, taken, batch)


def placed(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """The batch on a device, its images in the layout that they are computed in."""
    return pytree.tree_map_only(Tensor, lambda tensor: moved(tensor, device, channels_last), batch)
