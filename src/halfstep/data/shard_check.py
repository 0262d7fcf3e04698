"""Compare shards with their index: a few in the background of a run, or all of them; name the samples that differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TypeVar

import numpy as np

from halfstep.data.dataset import derive_seed
from halfstep.data.file_state import FileState
from halfstep.data.shard_index import DIGEST, LABEL, PackedShard, ShardIndex, pack_shard_rows
from halfstep.data.shards import Shards
from halfstep.errors import BadData
from halfstep.numbers import format_counted_noun

T = TypeVar("T")
AT_ONCE = 16
"""Shards that are verified in each epoch, over all ranks."""


def describe_shard_change(shards: Shards, number: int, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Read a shard whole, and return how it differs from its index; empty if it does not."""
    try:
        now = pack_shard_rows(shards.scan(number, is_stopped))
    except BadData as error:
        return error.given
    if now.digest.hex() == shards.index.content(number):
        return ""
    return _describe_sample_change(shards, number, now, shards.index.packed(number))


def describe_sample_changes(before: ShardIndex, now: Shards) -> list[str]:
    """Return a line for each shard that an earlier index has with other samples."""
    numbers = {name: number for number, name in enumerate(before.names)}
    lines = []
    for number, name in enumerate(now.index.names):
        old = numbers.get(name)
        if old is None or before.content(old) == now.index.content(number):
            continue
        lines.append(_describe_sample_change(now, number, now.index.packed(number), before.packed(old)))
    return lines


def _describe_sample_change(shards: Shards, number: int, now: PackedShard, before: PackedShard) -> str:
    if now.rows != before.rows:
        return f"{shards.index.names[number]} has {format_counted_noun(now.rows, 'sample')}, before {before.rows:,}"
    differs = [now.column(one) != before.column(one) for one in (DIGEST, LABEL)]
    others = np.flatnonzero(differs[0] | differs[1])
    if not len(others):
        return f"{shards.index.names[number]} has the same images and labels, with other names or in other places"
    first = shards.name(shards.index.first(number) + int(others[0]))
    return f"{format_counted_noun(len(others), 'sample')} changed in {shards.index.names[number]}, the first {first}"


class ShardSpotCheck:
    """Verifies a few shards in each epoch, in a thread: a shard may change and keep its size and its times."""

    def __init__(self, shards: Shards, seed: int, rank: int = 0, size: int = 1) -> None:
        self._shards, self._seed, self._rank, self._size = shards, seed, rank, size
        self._done: set[int] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._found: str | None = None

    def chosen(self, epoch: int) -> list[int]:
        """Return the shards of an epoch that this rank verifies."""
        generator = np.random.default_rng(derive_seed(self._seed, "verify", epoch))
        count = len(self._shards.index.names)
        every = generator.choice(count, min(AT_ONCE, count), replace=False)
        return [int(one) for one in every[self._rank :: self._size]]

    def verified(self, epoch: int, windows: Iterator[T]) -> Iterator[T]:
        """Yield these windows, and verify the shards of their epoch meanwhile; raise BadData if one differs."""
        self.begin(epoch)
        try:
            for window in windows:
                self.look()
                yield window
        finally:
            self._stop.set()

    def begin(self, epoch: int) -> None:
        """Start to verify the shards of an epoch, unless those of an earlier one are still being read."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._verify, args=(self.chosen(epoch),), daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Raise BadData if a shard differs from its index."""
        if self._found is not None:
            raise BadData(
                f"{self._found}, unlike the index {self._shards.index.path}",
                allowed="shards that stay unchanged after indexing",
                do=f"restore the shard, or rm {self._shards.index.path} and start the same command again",
            )

    def _verify(self, chosen: list[int]) -> None:
        for number in chosen:
            # A file that has changed since the run began is compared sample by sample, as it is read.
            with suppress(OSError, CancelledError):
                state = FileState.of(self._shards.path(number).stat())
                if number not in self._done and self._shards.is_as_before(number, state):
                    change = describe_shard_change(self._shards, number, self._stop.is_set)
                    if change and not self._stop.is_set():
                        self._found = change
                        return
                    self._done.add(number)
            if self._stop.is_set():
                return
