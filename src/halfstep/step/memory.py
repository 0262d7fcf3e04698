"""Memory of tensors as integers: copied, compared and written back bit by bit, for any number format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALL = 2**16
"""Elements: statistics and counters have fewer, tables and masks more."""

_FEW = 16
"""Rows up to which a copy of each costs no more than one of a joined memory."""

Storage = torch.UntypedStorage


def unwrap_strided_tensors(tensors: Iterable[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """Return for each tensor the strided tensors that hold its numbers, each with the `identify_storage` of its memory.

    That is the tensor itself, or those inside a wrapper such as a DTensor. A list is empty for tensors without memory
    of that kind: sparse, meta and fake ones.
    """
    return [list(_iterate_strided_parts(tensor)) for tensor in tensors]


def _iterate_strided_parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for held in [getattr(tensor, name) for name in flatten()[0]]:
            if isinstance(held, Tensor):
                yield from _iterate_strided_parts(held)
        return
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, fake and uninitialized tensors
        return
    if not tensor.is_meta and tensor.layout is torch.strided:
        yield int(storage._cdata), tensor


def view_memory_as_integers(tensor: Tensor) -> Tensor:
    """Return the extent of a plain tensor's memory as one row of integers, which shares it."""
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = size * (1 + last) if tensor.numel() else 0
    return view_bytes_as_integers(tensor.untyped_storage(), size * int(tensor.storage_offset()), length)


def view_bytes_as_integers(storage: Storage, start: int, length: int) -> Tensor:
    """Return some bytes of a storage as one row of integers, the widest that fit."""
    dtype, size = (torch.int64, 8) if (start | length) % 8 == 0 else (torch.uint8, 1)
    row = torch.empty(0, dtype=dtype, device=storage.device)
    return row.set_(storage, start // size, (length // size,), (1,))  # type: ignore[call-overload,no-any-return]


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Return whether two plain tensors are one view of one memory: `.data =`, `set_` and `resize_` change that."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


class CopiedTensor(NamedTuple):
    """A plain tensor with a copy of its memory."""

    name: str
    tensor: Tensor
    alias: Tensor
    """Shares the memory that the tensor had when it was copied first, with its shape and strides."""
    row: Tensor
    copy: Tensor

    def before(self) -> Tensor:
        """Return the copy in the tensor's format, shape and strides; it may share the copy."""
        row = torch.empty(0, dtype=self.alias.dtype, device=self.copy.device)
        # With its own memory: as a part of a joined one, it may start at an address that the format does not allow.
        own = self.copy if self.copy.untyped_storage().nbytes() == self.copy.nbytes else self.copy.clone()
        storage, size, strides = own.untyped_storage(), self.alias.size(), self.alias.stride()
        return row.set_(storage, 0, size, strides)  # type: ignore[call-overload,no-any-return]


def copy_tensors(named: Iterable[tuple[str, Tensor]], known: Iterable[CopiedTensor] = ()) -> list[CopiedTensor]:
    """Copy plain tensors; those of `known` that have the same memory keep their entry, and its copy may be older."""
    entries = {id(entry.tensor): entry for entry in known}
    found = []
    for name, tensor in named:
        entry = entries.get(id(tensor))
        if entry is None or not is_same_view(tensor, entry.alias):
            row = view_memory_as_integers(tensor.detach())
            entry = CopiedTensor(name, tensor, tensor.detach(), row, row.clone())
        found.append(entry)
    return found


class MemoryCopies:
    """Rows of memory with their copies."""

    def __init__(self, copied: Iterable[CopiedTensor] = ()) -> None:
        entries = list(copied)
        self.rows = [entry.row for entry in entries]
        self.copies = [entry.copy for entry in entries]
        self._is_renewed = False
        self._joined: list[tuple[list[Tensor], Tensor]] | None = None
        """Small rows of one format, each with the memory that all of their copies are parts of."""
        self._others: tuple[list[Tensor], list[Tensor]] = [], []

    def add(self, row: Tensor, copy: Tensor | None = None) -> Tensor:
        """Cover a row, with the copy that an earlier window made of it, or a new one; return the copy."""
        self._joined = None
        self.rows.append(row)
        self.copies.append(row.clone() if copy is None else copy)
        return self.copies[-1]

    def renew(self) -> None:
        """Copy all rows anew, in one call: a model can have hundreds of small buffers."""
        if len(self.rows) < _FEW or not self._is_renewed:
            # Some models have other buffers in each step: their copies are not worth joining.
            self._is_renewed = True
            if self.rows:
                torch._foreach_copy_(self.copies, self.rows)
            return
        if self._joined is None:
            self._join()
        for rows, joined in self._joined or ():
            torch.cat(rows, out=joined)
        if self._others[0]:
            torch._foreach_copy_(*self._others)

    def _join(self) -> None:
        """Give the copies of small rows one memory, into which a single kernel writes."""
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        self._joined, self._others = [], ([], [])
        for place, row in enumerate(self.rows):
            if row.nbytes <= SMALL:
                kinds.setdefault((row.device, row.dtype), []).append(place)
            else:
                self._others[0].append(self.copies[place])
                self._others[1].append(row)
        for places in kinds.values():
            rows = [self.rows[place] for place in places]
            joined = torch.cat([self.copies[place] for place in places])
            for place, part in zip(places, joined.split([len(row) for row in rows]), strict=True):
                self.copies[place].set_(part)  # type: ignore[call-overload]  # others hold this tensor
            self._joined.append((rows, joined))

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


def have_different_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ in any visible bit: -0.0 is not 0.0, and NaN differs from itself."""
    if a.layout is not torch.strided:
        return not have_same_sparse_values(a, b)
    if not torch.equal(a, b):
        return True
    # torch.equal takes -0.0 for 0.0. NaN differs from itself, so a buffer with NaN counts as written, which is safe.
    return a.is_floating_point() and not torch.equal(a.signbit(), b.signbit())


def have_same_sparse_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two sparse tensors hold the same numbers."""
    same = a.shape == b.shape and a.layout == b.layout
    return same and torch.equal(a.to_sparse().coalesce().values(), b.to_sparse().coalesce().values())


class WeakStorageCopy:
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


def restore_tensor_memory(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give each tensor the memory, the shape and the strides of its alias again, where it lost them."""
    for tensor, alias in pairs:
        if not is_same_view(tensor, alias):
            tensor.data = alias
