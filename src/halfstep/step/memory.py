"""Memory of tensors as integers: copied, compared and written back bit by bit, for any number format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALL = 2**16
"""Elements: statistics and counters have fewer, tables and masks more."""

Storage = torch.UntypedStorage


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold a tensor's numbers: itself, or those inside a wrapper such as a DTensor.

    Empty for tensors without memory of that kind: sparse, meta and fake ones.
    """
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        inner = [getattr(tensor, name) for name in flatten()[0]]
        return [part for held in inner if isinstance(held, Tensor) for part in plain_parts(held)]
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, fake and uninitialized tensors
        return []
    return [] if tensor.is_meta or tensor.layout is not torch.strided else [tensor]


def words_of(tensor: Tensor) -> Tensor:
    """Return the extent of a plain tensor's memory as one row of integers, which shares it."""
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = size * (1 + last) if tensor.numel() else 0
    return words_in(tensor.untyped_storage(), size * int(tensor.storage_offset()), length)


def words_in(storage: Storage, start: int, length: int) -> Tensor:
    """Return some bytes of a storage as one row of integers, the widest that fit."""
    dtype, size = (torch.int64, 8) if (start | length) % 8 == 0 else (torch.uint8, 1)
    row = torch.empty(0, dtype=dtype, device=storage.device)
    return row.set_(storage, start // size, (length // size,), (1,))  # type: ignore[call-overload,no-any-return]


def like(words: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of `words_of(tensor)` as a tensor of the same format, shape and strides; it shares the copy."""
    row = torch.empty(0, dtype=tensor.dtype, device=words.device)
    return row.set_(words.untyped_storage(), 0, tensor.size(), tensor.stride())  # type: ignore[call-overload,no-any-return]


def same_place(a: Tensor, b: Tensor) -> bool:
    """Return whether two plain tensors are one view of one memory: `.data =`, `set_` and `resize_` change that."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


class Copies:
    """Rows of memory with their copies."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.copies: list[Tensor] = []

    def add(self, row: Tensor, copy: Tensor | None = None) -> Tensor:
        """Cover a row, with the copy that an earlier window made of it, or a new one; return the copy."""
        self.rows.append(row)
        self.copies.append(row.clone() if copy is None else copy)
        return self.copies[-1]

    def renew(self) -> None:
        """Copy all rows anew, in one call: a model can have hundreds of small buffers."""
        if self.rows:
            torch._foreach_copy_(self.copies, self.rows)

    def write_back(self) -> None:
        """Write the copies back where the memory differs from them."""
        for row, copy in zip(self.rows, self.copies, strict=True):
            storage = row.untyped_storage()
            end = int(row.storage_offset() + row.numel()) * row.element_size()
            if storage.nbytes() < end:
                storage.resize_(end)
            # Compared first: nothing else is touched, and memory that cannot be written is rarely one that was.
            if not torch.equal(row, copy):
                row.copy_(copy)


class WeakBlock:
    """A storage that somebody else holds, with a copy of its bytes."""

    def __init__(self, storage: Storage, *, written: bool) -> None:
        self._storage = StorageWeakRef(storage)
        self.written = written
        """Whether an operation was seen to write it, and not only to read it."""
        self.copy: Tensor | None = None

    def storage(self) -> Storage | None:
        """Return the storage, or None once nobody holds it."""
        found: Any = Storage._new_with_weak_ptr(self._storage.cdata)  # type: ignore[attr-defined]
        return found if isinstance(found, Storage) else None


def put_back_places(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give each tensor the memory, the shape and the strides of its alias again, where it lost them."""
    for tensor, alias in pairs:
        if not same_place(tensor, alias):
            tensor.data = alias
