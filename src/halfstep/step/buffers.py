"""The registered buffers of modules: BatchNorm statistics, counters, masks, anything that a forward pass writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Slots = dict[str, Tensor | None]


class Buffers:
    """The buffers of some modules, as they are registered at any time."""

    def __init__(self, *models: nn.Module) -> None:
        modules = ((path, module) for model in models for path, module in model.named_modules())
        # The `_buffers` dictionaries themselves: walking a model's modules costs more than copying its buffers.
        unique = {id(m): (f"{path}." if path else "", m._buffers) for path, m in modules}
        self._slots: list[tuple[str, Slots]] = list(unique.values())

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the buffers that are registered now."""
        for _, slots in self._slots:
            for buffer in slots.values():
                if buffer is not None:
                    yield buffer

    def named(self) -> dict[str, Tensor]:
        """Return the registered buffers by name."""
        return {name: buffer for name, buffer in self.registered().items() if buffer is not None}

    def registered(self) -> dict[str, Tensor | None]:
        """Return the registered buffers by name, including those registered as None."""
        return {path + name: buffer for path, slots in self._slots for name, buffer in slots.items()}

    def names(self) -> set[str]:
        """Return the names of all registered buffers, including those registered as None."""
        return set(self.registered())


def find_buffer(slots: Slots, name: str) -> Tensor | None:
    """Return the buffer that is registered under a name, or None."""
    return slots[name] if name in slots else None  # noqa: SIM401 (those of torch.jit modules have no `get`)


def put_buffer(slots: Slots, name: str, value: Tensor | None) -> None:
    """Copy into the registered tensor, which other code may hold; replace it by a copy if that is impossible."""
    buffer = find_buffer(slots, name)
    try:
        if buffer is not None and value is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)
            return
    except RuntimeError:  # expanded: several of its elements share one place in memory
        pass
    slots[name] = None if value is None else value.clone()


def read_version_counter(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


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
