"""The validation share of an indexed set without a list: one bit for each sample, and a count every 4,096. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import numpy as np

from halfstep.data.sealed_pages import DamagedPages, SealedPages, seal_pages
from halfstep.data.shard_index import PLACE, ShardIndex
from halfstep.errors import StorageFailed
from halfstep.files import find_cache_folder, replace_file_unflushed

EVERY = 4096
"""Samples per count."""
Bits = np.ndarray[Any, np.dtype[np.uint8]]


class ShareBits:
    """A bit for each sample, in a file or in memory; those after the last sample are on neither side."""

    def __init__(self, content: SealedPages | bytes) -> None:
        self._content = content
        self.size = content.size if isinstance(content, SealedPages) else len(content)

    def _read(self, at: int, size: int) -> bytes:
        content = self._content
        try:
            return content.read(at, size) if isinstance(content, SealedPages) else content[at : at + size]
        except DamagedPages:  # compared at the start, and again by a process that has opened it later
            raise StorageFailed(
                "the share for validation was changed in the cache",
                allowed="a cache that stays unchanged during a run",
                do="start the same command again: a damaged share is made anew",
            ) from None

    def block(self, number: int) -> Bits:
        """Return the bits of a block of `EVERY` samples, a number for each."""
        return np.unpackbits(np.frombuffer(self._read(number * EVERY // 8, EVERY // 8), np.uint8), bitorder="little")

    @property
    def packed(self) -> Bits:
        """All of them, eight in a byte."""
        return np.frombuffer(self._read(0, self.size), np.uint8)


class SampleNumbers(Sequence[int]):
    """The numbers of the samples on one side of a share, in order."""

    def __init__(self, bits: ShareBits, counts: np.ndarray[Any, Any], samples: int, held_out: bool) -> None:
        self._bits, self._held_out, self.samples = bits, held_out, samples
        starts = np.minimum(np.arange(len(counts), dtype=np.int64) * EVERY, samples)
        self._counts = counts if held_out else starts - counts
        """The samples of this side before each block, and all of them at the end."""

    def __len__(self) -> int:
        return int(self._counts[-1])

    @overload
    def __getitem__(self, number: int) -> int: ...
    @overload
    def __getitem__(self, number: slice) -> list[int]: ...
    def __getitem__(self, number: int | slice) -> int | list[int]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(number)
        block = int(self._counts.searchsorted(number, "right")) - 1
        bits = self._bits.block(block)
        found = np.flatnonzero(bits if self._held_out else bits == 0)
        return block * EVERY + int(found[number - int(self._counts[block])])

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """Return the place of a sample; raise ValueError if it is on the other side."""
        block, place = divmod(value, EVERY)
        if not 0 <= value < self.samples:
            raise ValueError(value)
        bits = self._bits.block(block)
        if bool(bits[place]) != self._held_out:
            raise ValueError(value)
        before = int(bits[:place].sum())
        return int(self._counts[block]) + (before if self._held_out else place - before)

    @property
    def digest(self) -> str:
        """Digits that stand for the share and the side."""
        found = blake2b(bytes([self._held_out]), digest_size=8)
        found.update(self._bits.packed)  # type: ignore[arg-type]
        return found.hexdigest()


def split_index_samples(
    index: ShardIndex, share: float, exact_place: Callable[[int], float]
) -> tuple[SampleNumbers, SampleNumbers]:
    """Return the numbers for training and for validation: those that `layout.select_validation_by_position` chooses.

    `exact_place` is called for the few samples whose position the index does not tell apart from the share.
    """
    name = f"val-{share!r}"
    kept = [] if index.path is None else [index.path.with_name(f"{index.path.name}.{name}")]
    kept.append(find_cache_folder() / "shards" / f"{index.seal[:32]}.{name}")
    bits = next((found for path in kept if (found := _read_share_bits(path, index, share)) is not None), None)
    if bits is None:
        chosen = _select_held_out(index, share, exact_place)
        key = _build_share_key(index, share)
        bits = ShareBits(chosen.tobytes())
        for path in kept:
            with suppress(OSError):
                with replace_file_unflushed(path) as draft:
                    draft.write_bytes(seal_pages(chosen.tobytes(), key))
                break
    ones = np.add.reduceat(_ONES[bits.packed], np.arange(0, bits.size, EVERY // 8), dtype=np.int64)
    counts = np.concatenate([[0], np.cumsum(ones)])
    return SampleNumbers(bits, counts, len(index), held_out=False), SampleNumbers(
        bits, counts, len(index), held_out=True
    )


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1).astype(np.uint16)


def _select_held_out(index: ShardIndex, share: float, exact_place: Callable[[int], float]) -> Bits:
    bits = np.zeros(-(-len(index) // EVERY) * EVERY // 8, np.uint8)
    threshold, count = int(share * 2**32), 0
    for shard in range(len(index.names)):
        first, places = index.first(shard), index.packed(shard).column(PLACE)
        chosen = places < threshold
        # The index has half of a position: where that half is equal, or a float would be, the name decides.
        for number in np.flatnonzero((places == threshold) | (places == threshold - 1)).tolist():
            chosen[number] = exact_place(first + number) < share
        # A shard starts within a byte of the bits.
        packed = np.packbits(np.concatenate([np.zeros(first % 8, bool), chosen]), bitorder="little")
        bits[first // 8 : first // 8 + len(packed)] |= packed
        count += int(chosen.sum())
    # Neither side is empty: where chance leaves one so, the nearest sample is moved there.
    if count in (0, len(index)):
        sign = 1 if count == 0 else -1
        each = (sign * index.packed(shard).column(PLACE).astype(np.int64) for shard in range(len(index.names)))
        _, moved = min((int(one.min()), index.first(shard) + int(one.argmin())) for shard, one in enumerate(each))
        bits[moved // 8] ^= 1 << moved % 8
    return bits


def _build_share_key(index: ShardIndex, share: float) -> str:
    return f"{index.seal[:32]} {share!r}"


def _read_share_bits(path: Path, index: ShardIndex, share: float) -> ShareBits | None:
    """Return the bits of a share; None if they are missing, damaged, or of another index or share."""
    with suppress(OSError, StorageFailed, DamagedPages):
        bits = ShareBits(SealedPages.open(path, "the share for validation", _build_share_key(index, share)))
        # All pages are compared now: a file that is damaged is written again.
        return bits if len(bits.packed) == -(-len(index) // EVERY) * EVERY // 8 else None
    return None
