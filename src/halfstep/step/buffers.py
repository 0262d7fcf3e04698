"""Buffers as they were before a window: BatchNorm statistics, counters, whatever a forward pass writes.

A skipped update that leaves its batch in the running statistics has not been skipped. Copies are kept between steps.
Small buffers are copied anew before each window, because torch's own batch norm kernel writes running statistics
without moving their version counter; large ones (tables, masks) only where that counter moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SMALL = 2**21
"""Elements: statistics, counters and codebooks have fewer, large tables that never change have more."""

Slots = dict[str, Tensor | None]


@dataclass(slots=True)
class _Kept:
    buffer: Tensor
    """The very tensor that was registered: code may hold references to it."""
    copy: Tensor
    version: int
    """Of the buffer when it was copied; -1 where it has no counter, and is copied always."""

    @property
    def stale(self) -> bool:
        return self.version < 0 or self.version != self.buffer._version or self.buffer.numel() <= SMALL

    def refresh(self) -> None:
        self.version = _version(self.buffer)
        if self.version < 0 or self.copy.shape != self.buffer.shape:
            self.copy = self.buffer.detach().clone()

    def put_back(self) -> Tensor:
        """The tensor to register again: the same one with its old content, or a copy where it cannot be written."""
        if self.version < 0 or self.buffer.shape != self.copy.shape:
            return self.copy
        small = self.buffer.numel() <= SMALL
        if self.buffer._version == self.version and not (small and _differ(self.buffer, self.copy)):
            return self.buffer
        try:
            self.buffer.copy_(self.copy)
        except RuntimeError:  # expanded: several of its elements share one place in memory
            return self.copy
        return self.buffer


class Buffers:
    """Can put every buffer of a model back to where it was at the last `remember`."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[int, _Kept] = {}
        self._registered: list[Slots | None] = []
        self.follow(model.named_modules())

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """These are the modules now."""
        # The dictionaries themselves: walking a model's modules costs more than copying its buffers.
        self._slots: list[tuple[str, Slots]] = [(f"{path}." if path else "", m._buffers) for path, m in modules]

    def __iter__(self) -> Iterator[Tensor]:
        """The buffers registered now."""
        for _, slots in self._slots:
            for buffer in slots.values():
                if buffer is not None:
                    yield buffer

    def named(self) -> dict[str, Tensor]:
        return {
            path + name: buffer for path, slots in self._slots for name, buffer in slots.items() if buffer is not None
        }

    def names(self) -> set[str]:
        """Those registered without a tensor, too."""
        return {path + name for path, slots in self._slots for name in slots}

    @torch.no_grad()
    def remember(self) -> None:
        """Before the first micro-batch."""
        self._registered = [dict(slots) if slots else None for _, slots in self._slots]
        kept, stale = {}, []
        for buffer in self:
            known = self._kept.get(id(buffer))
            if known is None:
                known = _Kept(buffer, buffer.detach().clone(), _version(buffer))
            elif known.stale:
                known.refresh()
                stale.append(known)
            kept[id(buffer)] = known
        self._kept = kept
        plain = [known for known in stale if known.version >= 0]
        if plain:
            torch._foreach_copy_([known.copy for known in plain], [known.buffer for known in plain])

    def remembered(self) -> dict[str, Tensor | None]:
        """By name, as they were at the last `remember`; the tensors are ours: copy them to keep them."""
        return {
            path + name: None if buffer is None else self._kept[id(buffer)].copy
            for (path, _), before in zip(self._slots, self._registered, strict=True)
            for name, buffer in (before or {}).items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """After a skip: rebind what was rebound, copy back what was written, touch nothing else."""
        back = {key: kept.put_back() for key, kept in self._kept.items()}
        for (_, slots), before in zip(self._slots, self._registered, strict=True):
            if slots or before:
                slots.clear()
                slots.update({name: None if b is None else back[id(b)] for name, b in (before or {}).items()})


def put_buffer(slots: Slots, name: str, value: Tensor | None) -> None:
    """Into the very tensor that is there, for code may hold on to it; a copy in its place where that cannot be."""
    buffer = slots.get(name)
    try:
        if buffer is not None and value is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)
            return
    except RuntimeError:  # expanded: several of its elements share one place in memory
        pass
    slots[name] = None if value is None else value.clone()


def _version(buffer: Tensor) -> int:
    """Sparse buffers and those made under inference_mode cannot be copied into, and some have no counter."""
    return -1 if buffer.layout is not torch.strided or buffer.is_inference() else buffer._version


def _differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a, b)
