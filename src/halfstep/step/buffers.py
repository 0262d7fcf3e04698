"""Buffers as they were before a window: BatchNorm statistics, counters, whatever a forward pass writes.

A skipped update that leaves its batch in the running statistics has not been skipped. Copies are kept between steps.
Integer buffers are copied anew only where their version counter moved; floating ones always, because torch's own
batch norm kernel writes running statistics without moving that counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class _Kept:
    buffer: Tensor
    """The very tensor that was registered: code may hold references to it."""
    copy: Tensor
    version: int


class Buffers:
    """Can put every buffer of a model back to where it was at the last `remember`."""

    def __init__(self, model: nn.Module) -> None:
        # The dictionaries themselves: walking a model's modules costs more than copying its buffers.
        self._slots = [module._buffers for module in model.modules()]
        self._paths = [f"{path}." if path else "" for path, _ in model.named_modules()]
        self._registered: list[dict[str, Tensor | None] | None] = []
        self._kept: dict[int, _Kept] = {}

    def __iter__(self) -> Iterator[Tensor]:
        """The buffers registered now."""
        for slots in self._slots:
            for buffer in slots.values():
                if buffer is not None:
                    yield buffer

    def named(self) -> dict[str, Tensor]:
        return {
            path + name: buffer
            for path, slots in zip(self._paths, self._slots, strict=True)
            for name, buffer in slots.items()
            if buffer is not None
        }

    def remember(self) -> None:
        """Before the first micro-batch."""
        self._registered = [dict(slots) if slots else None for slots in self._slots]
        stale: list[_Kept] = []
        kept: dict[int, _Kept] = {}
        for buffer in self:
            known = self._kept.get(id(buffer))
            if known is None:
                known = _Kept(buffer, buffer.detach().clone(), buffer._version)
            elif known.version != buffer._version or buffer.is_floating_point():
                known.version = buffer._version
                stale.append(known)
            kept[id(buffer)] = known
        self._kept = kept
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([k.copy for k in stale], [k.buffer for k in stale])

    def restore(self) -> None:
        """After a skip: rebind what was rebound, copy back what was written, touch nothing else."""
        for slots, before in zip(self._slots, self._registered, strict=True):
            if slots or before:
                slots.clear()
                slots.update(before or {})
        with torch.no_grad():
            for kept in self._kept.values():
                if kept.buffer._version != kept.version or not torch.equal(kept.buffer, kept.copy):
                    kept.buffer.copy_(kept.copy)
                    kept.version = kept.buffer._version
