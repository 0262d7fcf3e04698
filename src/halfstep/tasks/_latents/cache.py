"""The latents of every sample of a source, encoded once and kept on the disk until what they depend on changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from halfstep import world
from halfstep.errors import BadData, NotBegun
from halfstep.files import cache_folder
from halfstep.tasks._latents.chunks import GOOD, MOMENTS, PER_CHUNK, Chunks, no_room, refused
from halfstep.tasks._latents.encoding import Encoding, evenly, ready_image
from halfstep.tasks._latents.everyone import from_everyone, here
from halfstep.tasks._latents.key import key_of, words_of
from halfstep.train.data.source import Source
from halfstep.train.journal.numbers import size as in_words
from halfstep.train.start import decided_once
from halfstep.train.stopping import asked_to_stop
from halfstep.train.task import Told, unheard

FOLDER = "latents"
MOST_OPEN = 64
"""Files that a process holds open at once."""
FAIR = 4096
"""Samples that say enough about all of them, where their moments need only be read."""
SPARE = 1.05
"""The room on the disk, against what the numbers take: files have headers, and the disk has other users."""


class CachedLatents:
    """The moments of samples by number. Files are opened where they are read: safe to send to workers."""

    def __init__(self, chunks: Chunks, notes: list[str]) -> None:
        self.chunks, self.notes = chunks, notes
        self._opened: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.chunks.samples

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": {}}

    def moments(self, number: int) -> Tensor | None:
        """Of a sample, in fp32; None where it could not be read when the others were encoded."""
        chunk, row = divmod(number, PER_CHUNK)
        path = self.chunks.path(chunk)
        try:
            opened = self._open(chunk)
            if not bool(opened.get_slice(GOOD)[row : row + 1]):
                return None
            moments: Tensor = opened.get_slice(MOMENTS)[row : row + 1][0].clone()
        except (OSError, SafetensorError) as error:
            raise BadData(
                f"{path} cannot be read any more: {error}",
                allowed="latents that stay where they are while a run uses them",
                do="start the run again with the same command: what is missing is encoded anew",
            ) from error
        if not bool(torch.isfinite(moments).all()):
            raise refused(path, f"it holds numbers that are not finite, in row {row}")
        return moments

    def spread(self, most: int = FAIR) -> Iterator[Tensor]:
        """Moments of some samples from all over the source; each process has its share of them."""
        for number in evenly(len(self), most)[world.rank() :: world.size()]:
            moments = self.moments(number)
            if moments is not None:
                yield moments

    def _open(self, chunk: int) -> Any:
        if chunk not in self._opened:
            if len(self._opened) >= MOST_OPEN:
                del self._opened[next(iter(self._opened))]
            self._opened[chunk] = self.chunks.open(chunk)
        return self._opened[chunk]


def cached(encoding: Encoding, source: Source, *, parts: Mapping[str, str], told: Told = unheard) -> CachedLatents:
    """Find the latents of a source, and encode those that are missing. Called by every process, which share the work.

    `parts` is what the latents depend on beside the data: the autoencoder's digest, the `format` it computes in, the
    size of the images. `told` hears, on the first process, how many of the samples are encoded.
    """
    words = json.loads(decided_once(lambda: json.dumps(words_of(encoding, source, parts))))
    key = key_of(words)
    chunks = Chunks(cache_folder() / FOLDER / key, key, len(source))
    lacking = from_everyone(lambda: _lacking(encoding, source, chunks))
    missing = sorted({chunk for some in lacking for chunk in some})
    filling = Filling(encoding, source, chunks, parts["format"], told)
    filling.fill(missing, world.rank(), world.size())
    # Machines that share no disk have only what their own processes wrote.
    unseen = from_everyone(lambda: [chunk for chunk in missing if not chunks.is_there(chunk)])
    filling.fill(unseen[world.rank()], *here())
    # The first process says what they are; where its disk is not seen, the first one of each machine.
    from_everyone(lambda: chunks.describe(words) if world.rank() == 0 else None)
    from_everyone(lambda: chunks.describe(words) if here()[0] == 0 else None)
    return CachedLatents(chunks, [_note(chunks, len(missing))])


class Filling:
    """Encoding what is missing, a chunk at a time on every process, so that all hear at once of one that failed."""

    def __init__(self, encoding: Encoding, source: Source, chunks: Chunks, computed_in: str, told: Told) -> None:
        self.encoding, self.source, self.chunks, self.computed_in = encoding, source, chunks, computed_in
        self.told = told if world.rank() == 0 else unheard

    def fill(self, missing: list[int], rank: int, size: int) -> None:
        """Every process calls this; of `missing`, each has every size-th one, beginning with its own number."""
        turns = max(from_everyone(lambda: -(-len(missing) // size)))
        if not turns:
            return
        from_everyone(lambda: self._begin(missing))
        mine, samples = missing[rank::size], len(self._numbers(missing))
        with closing(self.encoding.rows(self.source, self._numbers(mine))) as rows:
            for turn in range(turns):
                heard = from_everyone(lambda turn=turn: self._next(mine[turn : turn + 1], rows))  # type: ignore[misc]
                self.told(samples * (turn + 1) // turns, samples)
                _go_on(heard, self.chunks)

    def _begin(self, missing: list[int]) -> None:
        """Nothing is begun that the disk has no room for."""
        if not missing:
            return
        example = torch.zeros(1, *self.encoding.shape(self.source), device=self.encoding.device)
        samples = len(self._numbers(missing))
        needed = int(samples * self.encoding.moments(example)[0].numel() * 4 * SPARE)
        folder = self.chunks.folder
        free = shutil.disk_usage(next(place for place in folder.parents if place.is_dir())).free
        if needed > free:
            text = f"the latents of {samples:,} samples take {in_words(needed)} in {folder}"
            raise no_room(f"{text}, and the disk has {in_words(free)} left")

    def _numbers(self, chunks: list[int]) -> list[int]:
        return [number for chunk in chunks for number in self.chunks.numbers(chunk)]

    def _next(self, chunks: list[int], rows: Iterator[tuple[int, Tensor | None]]) -> str | None:
        """The signal that this process was asked to stop by."""
        for chunk in chunks:
            found = [next(rows) for _ in self.chunks.numbers(chunk)]
            for number, moments in found:
                self._finite(number, moments)
            self.chunks.write(chunk, [moments for _, moments in found])
        return asked_to_stop()

    def _finite(self, number: int, moments: Tensor | None) -> None:
        if moments is None or bool(torch.isfinite(moments).all()):
            return
        island = "keep the autoencoder in fp32: write model.autoencoder_island=frozen"
        weights = "take an autoencoder from before it went wrong, or train it again"
        raise BadData(
            f"{self.source.name(number)}: its latents, encoded in {self.computed_in}, are not finite",
            allowed="finite latents; what is kept would spoil every run that finds it",
            do=weights if self.computed_in == "fp32" else island,
        )


def _lacking(encoding: Encoding, source: Source, chunks: Chunks) -> list[int]:
    """Those that must be encoded, of this process's share of what is to be looked at on this machine."""
    first, step = here()

    def serves(chunk: int) -> bool:
        return chunks.is_whole(chunk) and not any(map(is_good_now, chunks.unread(chunk)))

    def is_good_now(number: int) -> bool:
        # A disk that failed for a moment must not cost its samples for ever.
        return ready_image(source, number, encoding.image_of) is not None

    return [chunk for chunk in range(first, len(chunks), step) if not serves(chunk)]


def _go_on(heard: list[str | None], chunks: Chunks) -> None:
    """Unless a process was asked to stop: then all of them do, and what is encoded is kept."""
    signal = next(filter(None, heard), None)
    if signal is not None:
        raise NotBegun(
            f"stopped by {signal} while latents were encoded; those that were are kept in {chunks.folder}",
            do="start it again with the same command: only what is missing is encoded",
        )


def _note(chunks: Chunks, encoded: int) -> str:
    what = f"{encoded} of {len(chunks)} files encoded now" if encoded else "found, nothing encoded"
    return f"latents of {chunks.samples:,} samples in {chunks.folder}: {what}"
