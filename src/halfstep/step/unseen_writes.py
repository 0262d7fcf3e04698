"""Notice writes to tensors that are not copied before each step: parameters, and large buffers.

They are not copied, because a frozen base may have billions of numbers. A write increases the version counter of a
tensor or, with `.data =`, changes its address: both are compared in every step. Only a write through `.data` in place
does neither. So each step also compares checksums of one group of the memory, in turn: before and after the window,
and with the group's last turn. If the memory has changed since then, inside a window or between two, the next windows
compare all of the group's tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from ctypes import Array, c_char
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep.step.census import POINTER, are_same, read_places, read_versions
from halfstep.step.memory import is_same_view, restore_tensor_memory, view_memory_as_integers

TENSORS_PER_STEP = 16
BYTES_PER_STEP = 2**26
"""Bytes that a step reads twice."""
BYTES_PER_STEP_ON_CPU = 2**18
"""On a CPU, whose step grows with the model: these, or a share of all memory if that is more."""
SHARE_PER_STEP_ON_CPU = 1 / 64
_LOOKS = 2
"""Windows that compare all tensors of a group after its memory has changed."""

Checksum: TypeAlias = "Tensor | bytes"
"""A row of integers on the device; of small memory that the host reads by itself, the memory as it is."""


class _MemoryPart(NamedTuple):
    """A part of one tensor's memory, small enough for one step."""

    place: int
    start: int
    end: int
    rows: list[Tensor] | None
    """The rows to sum or compare, see `_rows`; None for a weakly referenced tensor, whose memory is looked up."""


class _ChecksumGroup:
    """The parts that one step compares."""

    def __init__(self, parts: list[_MemoryPart]) -> None:
        self.parts = parts
        rows = [row for part in parts for row in part.rows or ()]
        on_host = all(part.rows for part in parts) and all(row.ndim == 1 and row.device.type == "cpu" for row in rows)
        # A storage of no bytes has no address.
        self._rows = [row for row in rows if row.nbytes]
        self.on_host = on_host
        """Whether its memory counts as it is, on a CPU; not if some of it is summed or looked up."""
        self._addresses: list[int] = []
        self._memory: list[Array[c_char]] = []
        places = [part.place for part in parts]
        self.pick = itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
        """Selects what belongs to its parts from a list with an entry for each tensor."""
        self.last: tuple[Tensor | int, Any] | None = None
        """The checksum in one number after the group's last turn, and the versions of its tensors then."""
        self.written_between = False
        """Whether its memory changes between windows, as that of a teacher which the loop updates through `.data`."""

    def read_host_memory(self) -> bytes:
        """Return the memory of a group on the host: for little memory, many times as fast as kernels."""
        addresses = list(map(POINTER, self._rows))
        if addresses != self._addresses:
            self._addresses = addresses
            self._memory = [
                (c_char * row.nbytes).from_address(at) for row, at in zip(self._rows, addresses, strict=True)
            ]
        return b"".join(self._memory)


class UnseenWriteDetector:
    """Tensors without a copy; finds those that a window has written."""

    def __init__(self) -> None:
        self._turn = self._held = 0
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._weak: list[tuple[str, weakref.ref[Tensor]]] = []
        self._versions: list[int] = []
        self._look_at_memory([])

    def follow(self, named: Iterable[tuple[str, Tensor]], weak: Iterable[tuple[str, weakref.ref[Tensor]]] = ()) -> None:
        """Check these tensors from now on; those of `weak` are held during a window only."""
        held, loose = list(named), list(weak)
        if self._checks(held, loose):
            return
        self._weak = loose
        self._names, self._tensors = [name for name, _ in held], [tensor for _, tensor in held]
        self._held = len(held)
        self._take_weak()
        self._look_at_memory(read_places(self._tensors))
        self._versions = read_versions(self._tensors)
        self.release()

    def _checks(self, held: Sequence[tuple[str, Tensor]], loose: Sequence[tuple[str, weakref.ref[Tensor]]]) -> bool:
        return are_same([tensor for _, tensor in held], self._tensors[: self._held]) and are_same(
            [weak for _, weak in loose], [weak for _, weak in self._weak]
        )

    def _take_weak(self) -> None:
        alive = [(name, reference, reference()) for name, reference in self._weak]
        self._weak = [(name, reference) for name, reference, tensor in alive if tensor is not None]
        self._names = self._names[: self._held] + [name for name, _ in self._weak]
        self._tensors = self._tensors[: self._held] + [tensor for _, _, tensor in alive if tensor is not None]

    def _look_at_memory(self, places: list[Any]) -> None:
        self._last_places = places
        # They share the memory and keep it alive without a copy, so that `.data =` can always be undone.
        self._aliases = [tensor.detach() for tensor in self._tensors]
        self._groups = list(self._divide_into_groups())
        self._suspects: list[_ChecksumGroup] = []
        self._compared: _ChecksumGroup | None = None
        self._before: Checksum | None = None
        self._known: list[bool] = []
        """The flags of memory that the host has compared by itself."""

    def _divide_into_groups(self) -> Iterator[_ChecksumGroup]:
        """Divide the memory into groups for one step each, on one device, and all trained or all not."""
        words = [view_memory_as_integers(tensor.detach()) for tensor in self._tensors]
        places = sorted(range(len(words)), key=lambda place: self._tensors[place].requires_grad)
        kinds = [(words[place].device, self._tensors[place].requires_grad) for place in places]
        size = sum(row.nbytes for row in words)
        share = min(BYTES_PER_STEP, max(BYTES_PER_STEP_ON_CPU, int(size * SHARE_PER_STEP_ON_CPU)))

        def most(row: Tensor) -> int:
            return share if row.device.type == "cpu" else BYTES_PER_STEP

        if len({device for device, _ in kinds}) == 1 and len(words) <= TENSORS_PER_STEP and size <= most(words[0]):
            yield _ChecksumGroup([self._part(place, words[place], 0, words[place].numel()) for place in places])
            return
        parts: list[_MemoryPart] = []
        left, last = 0, None
        for place, kind in zip(places, kinds, strict=True):
            row, start = words[place], 0
            while start < row.numel():
                if parts and (kind != last or len(parts) == TENSORS_PER_STEP or left < 8):
                    yield _ChecksumGroup(parts)
                    parts = []
                if not parts:
                    left, last = most(row), kind
                end = min(row.numel(), start + left // 8 * 8 // row.element_size())
                parts.append(self._part(place, row, start, end))
                left -= (end - start) * row.element_size()
                start = end
        if parts:
            yield _ChecksumGroup(parts)

    def _part(self, place: int, words: Tensor, start: int, end: int) -> _MemoryPart:
        return _MemoryPart(place, start, end, _split_into_rows(words[start:end]) if place < self._held else None)

    @property
    def steps(self) -> int:
        """The number of steps after which a tensor that every step writes through `.data` is found at the latest."""
        return 1 if len(self._groups) < 2 else 2 * len(self._groups) + 1

    # -- one window ---------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Note versions and addresses, and the checksum of the next group, before the first micro-batch."""
        if self._weak:
            before = len(self._names)
            self._take_weak()
            if len(self._names) != before:
                self._last_places = []
        places = read_places(self._tensors)
        if places != self._last_places:
            self._look_at_memory(places)
        elif self._weak:
            self._aliases[self._held :] = [tensor.detach() for tensor in self._tensors[self._held :]]
        self._versions = read_versions(self._tensors)
        if self._suspects:
            self._compared = self._suspects.pop()
        elif self._groups:
            self._turn = (self._turn + 1) % len(self._groups)
            self._compared = self._groups[self._turn]
        self._before = None if self._compared is None else self._checksum(self._compared)
        self._known = []

    def changed(self) -> list[Tensor]:
        """Return flags on the device: whether the group has changed in this window, and since its last turn.

        Empty if the host knows by itself.
        """
        group, before = self._compared, self._before
        if group is None or before is None:
            return []
        after = self._checksum(group)
        differs: Any = after != before
        flags: list[Any] = [differs if isinstance(differs, bool) else differs.any()]
        # With one group, every window is its turn.
        if len(self._groups) > 1 and not group.written_between:
            if group.last is not None and group.last[1] == group.pick(self._versions):
                flags.append(group.last[0] != _fold_checksum(before))
            group.last = _fold_checksum(after), group.pick(read_versions(self._tensors))
        if isinstance(differs, bool):
            self._known, flags = flags, []
        return flags

    def written(self, flags: Sequence[float]) -> list[tuple[str, Tensor]]:
        """Return the tensors that this window wrote in place, by name; `flags` are those of `changed`, as numbers."""
        flags = flags or self._known
        versions = read_versions(self._tensors)
        if versions == self._versions and not any(flags):
            return []
        found: set[int] = set()
        group = self._compared
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            found = {place for place, (now, before) in enumerate(pairs) if now != before}
            if group is not None and len(self._groups) == 1:
                # `set_` increases the version but does not change the memory.
                moved = {place for place in found if not is_same_view(self._tensors[place], self._aliases[place])}
                found -= moved - self._differing(group) if moved else set()
        if group is not None and any(flags):
            if flags[0]:
                found |= self._differing(group)
            else:
                self._suspect(group)
        return [(self._names[place], self._tensors[place]) for place in sorted(found)]

    def _differing(self, group: _ChecksumGroup) -> set[int]:
        """Return the places of tensors whose checksums differ from those before the window; reads the device."""
        assert self._before is not None, "a group was compared"
        before, after = self._before, self._checksum(group)
        size = _count_bytes if isinstance(after, bytes) else _count_checksum_integers
        ends = list(accumulate(sum(map(size, self._rows(part))) for part in group.parts))
        spans = zip(group.parts, [0, *ends[:-1]], ends, strict=True)
        return {part.place for part, start, end in spans if not _is_equal(before[start:end], after[start:end])}

    def _suspect(self, group: _ChecksumGroup) -> None:
        """Compare all memory of a group's tensors in the next windows, to learn whether steps write it."""
        places = {part.place for part in group.parts}
        group.written_between = True
        parts = [part for other in self._groups for part in other.parts if part.place in places]
        self._suspects = [_ChecksumGroup(parts) for _ in range(_LOOKS)]

    def restore(self) -> None:
        """Restore the storage that the tensors had before the window; in-place writes to it stay."""
        restore_tensor_memory(zip(self._tensors, self._aliases, strict=True))

    def release(self) -> None:
        """Let go of tensors that are held weakly, after the window."""
        if self._weak:
            del self._tensors[self._held :], self._aliases[self._held :]

    def _rows(self, part: _MemoryPart) -> list[Tensor]:
        return (
            _split_into_rows(view_memory_as_integers(self._aliases[part.place])[part.start : part.end])
            if part.rows is None
            else part.rows
        )

    def _checksum(self, group: _ChecksumGroup) -> Checksum:
        """Return the checksum of a group; the host reads nothing from a device."""
        if group.on_host:
            return group.read_host_memory()
        return torch.cat([numbers for part in group.parts for row in self._rows(part) for numbers in _sum_row(row)])


# -- checksums --------------------------------------------------------------------------------------------------------
# Small memory counts as it is. Of larger memory the rows and columns of a table are summed, so that moved numbers count
# as well as changed ones. Integers wrap around: the result depends neither on the order of a sum nor on the format.

_WIDTH = 1024
"""Columns of a table."""
_RAW = 2048
"""Words up to which memory counts as it is."""


def _split_into_rows(words: Tensor) -> list[Tensor]:
    """Divide memory into one table of words of eight bytes, which is summed, and rows that count as they are."""
    if words.dtype is not torch.int64 and words.storage_offset() % 8 == 0 and words.numel() > 8 * _RAW:
        whole = words.numel() // 8 * 8
        # Words of eight bytes are summed many times as fast as bytes.
        return [*_split_into_rows(words[:whole].view(torch.int64)), words[whole:]]
    if words.numel() <= _RAW:
        return [words]
    whole = words.numel() // _WIDTH * _WIDTH
    return [words[:whole].view(-1, _WIDTH), words[whole:]]


def _sum_row(row: Tensor) -> list[Tensor]:
    if row.ndim == 2:
        return [row.sum(0), row.sum(1)]
    return [row if row.dtype is torch.int64 else row.long()]


def _count_checksum_integers(row: Tensor) -> int:
    """Return the number of integers in the checksum of a row."""
    return sum(row.shape)


def _count_bytes(row: Tensor) -> int:
    return row.nbytes


def _is_equal(a: Checksum, b: Checksum) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _fold_checksum(checksum: Checksum) -> Tensor | int:
    if isinstance(checksum, bytes):
        return hash(checksum)
    # Odd factors that differ from place to place, so that sums which change places count too.
    factors = torch.arange(1, 2 * len(checksum), 2, device=checksum.device) * 0x1E3779B97F4A7C15
    return (checksum * factors).sum()
