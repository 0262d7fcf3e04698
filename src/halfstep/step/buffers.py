"""Save and restore buffers: BatchNorm statistics, counters, whatever a forward pass writes.

A skipped update that leaves its batch in the running statistics has not been skipped. Copies are reused between steps.
Small buffers are copied before each window, because torch's batch norm kernel writes running statistics without
increasing their version counter. Large ones (causal masks, positional tables, codebooks) have one permanent copy, which
is refreshed when their version changed. In their first windows the content is compared too: a buffer that is written
through `.data`, which does not increase the counter, is copied each time from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 2**16
"""Elements: statistics and counters have fewer, tables and masks more."""
COMPARED = 2
"""Windows in which the content of a new large buffer is compared with its copy."""
SAMPLE = 64
"""Elements of a large buffer that are copied before each window, to tell whether its permanent copy is current."""

Slots = dict[str, Tensor | None]
_NO_MEMBERS: list[Any] = [object()]
"""A list that equals no list of buffers; None would not do, because buffers may be registered as None."""


class _SavedBuffer:
    """One buffer with its copy."""

    __slots__ = ("buffer", "compared", "copy", "each_time", "name", "sample", "sampled", "version")

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name, self.buffer = name, buffer
        """The registered tensor itself: other code may hold references to it."""
        self.copy = buffer.detach().clone()
        self.version = version_of(buffer)
        # An inference tensor has no version counter, so nothing would tell that it was written.
        self.each_time = self.version < 0 or buffer.numel() <= SMALL
        self.compared = 0 if self.each_time else COMPARED
        self.sample = None if self.each_time else _sample(buffer)
        self.sampled = None if self.sample is None else self.sample.clone()

    @property
    def copies_in_place(self) -> bool:
        return self.version >= 0 and self.buffer.layout is torch.strided and self.copy.shape == self.buffer.shape

    def written_silently(self) -> bool:
        """Return whether the content changed although the version did not; costs one host read."""
        return self.buffer._version == self.version and differ(self.buffer, self.copy)

    @property
    def current(self) -> bool:
        """Whether the copy is what the buffer held before this window, judged by a sample of both."""
        if self.sampled is None:
            return True
        sample = _sample(self.copy)
        return sample is not None and not differ(sample, self.sampled)

    def put_back(self) -> Tensor:
        """Restore the content and return the tensor to register: the same one, or a copy if it cannot be written."""
        if not self.copies_in_place:
            return self.copy.clone()
        if self.buffer._version == self.version and not differ(self.buffer, self.copy):
            return self.buffer
        try:
            self.buffer.copy_(self.copy)
        except RuntimeError:  # expanded: several of its elements share one place in memory
            return self.copy
        self.version = self.buffer._version
        return self.buffer


class Buffers:
    """The buffers of some modules, and their content at the last `remember`."""

    def __init__(self, *models: nn.Module) -> None:
        self._saved: dict[int, _SavedBuffer] = {}
        self._members: list[Any] = _NO_MEMBERS
        self._registered: list[Slots | None] = []
        self._each_time: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._cloned: list[_SavedBuffer] = []
        self._large: list[_SavedBuffer] = []
        self._never_finite: dict[str, bool] = {}
        self.bounded: list[_SavedBuffer] = []
        """Floating buffers that are copied each time and were finite when first seen."""
        self.follow((path, module) for model in models for path, module in model.named_modules())

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Use these modules from now on."""
        # The `_buffers` dictionaries themselves: walking a model's modules costs more than copying its buffers.
        unique = {id(m): (f"{path}." if path else "", m._buffers) for path, m in modules}
        self._slots: list[tuple[str, Slots]] = list(unique.values())
        self._members = _NO_MEMBERS  # the next window looks again

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the buffers that are registered now."""
        for _, slots in self._slots:
            for buffer in slots.values():
                if buffer is not None:
                    yield buffer

    def named(self) -> dict[str, Tensor]:
        """Return the registered buffers by name."""
        return {
            path + name: buffer for path, slots in self._slots for name, buffer in slots.items() if buffer is not None
        }

    def registered(self) -> dict[str, Tensor | None]:
        """Return the registered buffers by name, including those registered as None."""
        return {path + name: buffer for path, slots in self._slots for name, buffer in slots.items()}

    def names(self) -> set[str]:
        """Return the names of all registered buffers, including those registered as None."""
        return {path + name for path, slots in self._slots for name in slots}

    # -- before the window --------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Save the buffers, before the first micro-batch."""
        members = [buffer for _, slots in self._slots for buffer in slots.values()]
        # By identity: a name may get another tensor, and comparing contents would read the device.
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            self._look_anew(members)
        if members:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        for saved in self._cloned:
            saved.copy = saved.buffer.detach().clone()
        copies, buffers = self._each_time
        # resize_ changes the shape of the same tensor.
        if any([copy.shape != buffer.shape for copy, buffer in zip(copies, buffers, strict=True)]):
            self._resized()
            copies, buffers = self._each_time
        stale = [k for k in self._large if k.buffer._version != k.version]
        if stale:
            stale = self._refreshed(stale)
            copies, buffers = copies + [k.copy for k in stale], buffers + [k.buffer for k in stale]
        if copies:
            # One call for all of them: a model can have hundreds of small buffers.
            torch._foreach_copy_(copies, buffers)

    def _look_anew(self, members: list[Tensor | None]) -> None:
        """Rebuild the copies after buffers were registered, replaced or removed."""
        old, self._saved = self._saved, {}
        self._registered = [dict(slots) if slots else None for _, slots in self._slots]
        for path, slots in self._slots:
            for name, buffer in slots.items():
                if buffer is not None:
                    known = old.get(id(buffer))
                    # An id is reused after its tensor was freed.
                    fits = known is not None and known.buffer is buffer
                    self._saved[id(buffer)] = known if fits and known is not None else _SavedBuffer(path + name, buffer)
        self._members = members
        self._sort()

    def _sort(self) -> None:
        saved = self._saved.values()
        always = [k for k in saved if k.each_time and k.copies_in_place]
        self._cloned = [k for k in saved if k.each_time and not k.copies_in_place]
        sampled = [k for k in saved if not k.each_time and k.sampled is not None]
        self._each_time = (
            [k.copy for k in always] + [k.sampled for k in sampled if k.sampled is not None],
            [k.buffer for k in always] + [k.sample for k in sampled if k.sample is not None],
        )
        self._large = [k for k in saved if not k.each_time]
        self.bounded = [k for k in always if self._may_overflow(k)]

    def _resized(self) -> None:
        """Renew the copies of buffers that were resized in place."""
        for saved in self._saved.values():
            if saved.copy.shape != saved.buffer.shape:
                saved.copy, saved.version = saved.buffer.detach().clone(), version_of(saved.buffer)
                saved.sample = None if saved.each_time else _sample(saved.buffer)
                saved.sampled = None if saved.sample is None else saved.sample.clone()
        self._sort()

    def _may_overflow(self, saved: _SavedBuffer) -> bool:
        if not (saved.copies_in_place and saved.buffer.is_floating_point() and saved.buffer.numel()):
            return False
        if saved.name not in self._never_finite:  # checked once per name: some buffers are replaced in every step
            self._never_finite[saved.name] = not bool(saved.copy.isfinite().all())
        return not self._never_finite[saved.name]

    def _refreshed(self, stale: list[_SavedBuffer]) -> list[_SavedBuffer]:
        for saved in stale:
            saved.version = version_of(saved.buffer)
            if not saved.copies_in_place:
                saved.copy = saved.buffer.detach().clone()
        return [saved for saved in stale if saved.copies_in_place]

    # -- in the window ------------------------------------------------------------------------------------------

    def largest(self) -> list[Tensor]:
        """Return the largest magnitude in each buffer that once was finite; on the device, nothing is read."""
        # Not the 2-norm: squares of large but finite statistics would overflow.
        return list(torch._foreach_norm([k.buffer for k in self.bounded], torch.inf)) if self.bounded else []

    def not_finite(self) -> Tensor | None:
        """Return a flag on the device: whether a buffer that once was finite is not; None if there is no candidate."""
        if not self.bounded:
            return None
        largest = torch.stack(self.largest()).amax()
        # Zero of a finite number, else NaN: two kernels, where isfinite() takes five.
        return (largest - largest) != 0

    def first_not_finite(self) -> str | None:
        """Return the name of a buffer that this window made non-finite, or None; reads the device.

        A buffer that was non-finite before is not checked again.
        """
        found = [k for k in self.bounded if not bool(k.buffer.isfinite().all())]
        for saved in found:
            if bool(saved.copy.isfinite().all()):
                return saved.name
            self._never_finite[saved.name] = True
        self.bounded = [k for k in self.bounded if not self._never_finite[k.name]]
        return None

    def compare(self) -> None:
        """Find new large buffers that this window wrote without a version change, to copy them each time."""
        if not self._large:
            return
        new = [k for k in self._large if k.compared]
        for saved in new:
            saved.compared -= 1
            saved.each_time = saved.written_silently()
        if any(k.each_time for k in new):
            self._sort()

    def remembered(self) -> dict[str, Tensor | None]:
        """Return the buffers at the last `remember` by name; the tensors are reused, so copy them to keep them."""
        return {
            path + name: None if buffer is None else self._saved[id(buffer)].copy
            for (path, _), before in zip(self._slots, self._registered, strict=True)
            for name, buffer in (before or {}).items()
        }

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Restore after a skip: rebind what was rebound, copy back what was written, touch nothing else.

        Returns the names of large buffers whose copy is not current, because they were written silently in an earlier
        window.
        """
        lost = [k for k in self._large if not k.current and k.written_silently()]
        for saved in lost:
            saved.each_time = True
        # By id, because one buffer may be registered under several names.
        back = {key: saved.buffer if saved in lost else saved.put_back() for key, saved in self._saved.items()}
        for (_, slots), before in zip(self._slots, self._registered, strict=True):
            wanted = {name: None if b is None else back[id(b)] for name, b in (before or {}).items()}
            if slots.keys() != wanted.keys() or any(slots[name] is not wanted[name] for name in wanted):
                slots.clear()
                slots.update(wanted)
        self._members = _NO_MEMBERS if lost else self._members
        return [saved.name for saved in lost]


def put_buffer(slots: Slots, name: str, value: Tensor | None) -> None:
    """Copy into the registered tensor, which other code may hold; replace it by a copy if that is impossible."""
    buffer = slots.get(name)
    try:
        if buffer is not None and value is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)
            return
    except RuntimeError:  # expanded: several of its elements share one place in memory
        pass
    slots[name] = None if value is None else value.clone()


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def differ(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ in any visible bit: -0.0 is not 0.0, and NaN differs from itself."""
    if a.layout is not torch.strided:
        return not _same_sparse(a, b)
    if not torch.equal(a, b):
        return True
    # torch.equal takes -0.0 for 0.0. NaN differs from itself, so a buffer with NaN counts as written, which is safe.
    return a.is_floating_point() and not torch.equal(a.signbit(), b.signbit())


def _same_sparse(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.layout == b.layout
    return same and torch.equal(a.to_sparse().coalesce().values(), b.to_sparse().coalesce().values())


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a view of some evenly spread elements; None if the tensor is not contiguous."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_inference():
        return None
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // SAMPLE)]
