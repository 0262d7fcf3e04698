"""Cache the latents of every sample of a source on disk, under a key of everything they depend on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep import distributed
from halfstep.data.dataset import BadSample, Sample, Source, WrappedSource, complete_source
from halfstep.data.fingerprint import fingerprint
from halfstep.data.sealed_pages import DamagedPages, SealedPages, seal_pages
from halfstep.errors import BadData, NotBegun, StorageFailed
from halfstep.files import find_cache_folder, replace_file, write_json
from halfstep.numbers import format_bytes as in_words
from halfstep.safetensors_header import content
from halfstep.status_line import OnProgress
from halfstep.tasks.latent_cache.encoding import (
    MomentEncoder,
    read_finite_image,
    resolve_local_ranks,
    select_spaced_numbers,
)
from halfstep.train.signals import find_stop_signal
from halfstep.train.task import ignore_progress

VERSION = "3"
"""The version of the file layout; a new version does not find older files."""
LOOKED_AT = 32
"""How many images are hashed as the autoencoder sees them: generated samples have no file, and readers change."""


def collect_key_parts(encoding: MomentEncoder, source: Source, parts: Mapping[str, str]) -> dict[str, str]:
    """Return everything the latents of a source depend on: the caller's `parts`, and the data itself."""
    (found,) = fingerprint(source).parts
    words = {
        **parts,
        "version": VERSION,
        "samples": str(found.samples),
        "names": found.order,
        "files": found.digest,
        "images": _compute_image_digest(encoding, source),
    }
    if not found.whole:
        # The fingerprint of a large set does not read every byte; modification times catch the other changes.
        words["times"] = _compute_times_digest(source)
    return words


def _compute_image_digest(encoding: MomentEncoder, source: Source) -> str:
    digest = hashlib.sha256()
    for number in select_spaced_numbers(len(source), LOOKED_AT):
        image = read_finite_image(source, number, encoding.image_of)
        if image is None:
            digest.update(b"unreadable")
        else:
            digest.update(f"{tuple(image.shape)}".encode())
            digest.update(content(image))
    return digest.hexdigest()


def _compute_times_digest(source: Source) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(
        {(name, os.fspath(path)) for i in range(len(source)) for name, path in source.files_of(i)}
    ):
        try:
            # File names need not be valid UTF-8; the length prefix keeps two lists of names from the same hash.
            digest.update(f"{len(name)}:{name} {os.stat(path).st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
        except OSError:  # a sample that cannot be read is replaced when its turn comes
            digest.update(f"{len(name)}:{name} unreadable\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


PER_CHUNK = 256
ABOUT = "about.json"
"""A description of what the files depend on, for users; halfstep itself does not read it."""
_SHAPE = struct.Struct("<III")
"""Channels, height and width of the moments, at the beginning of a file."""


class LatentFile:
    """The latents of some samples: a shape, for each sample whether it was readable, and its moments in fp32.

    Each page is compared when it is first read. Raises OSError, StorageFailed or DamagedPages where it is not complete.
    """

    def __init__(self, path: Path, key: str, samples: int) -> None:
        self._pages, self._samples = SealedPages.open(path, "the latents", key), samples
        self._shape = _SHAPE.unpack(self._pages.read(0, _SHAPE.size))
        self._size = 4 * math.prod(self._shape)
        if self._pages.size != _SHAPE.size + samples * (1 + self._size):
            raise DamagedPages

    def is_good(self, row: int) -> bool:
        """Return whether a sample was readable."""
        return self._pages.read(_SHAPE.size + row, 1) != b"\0"

    def moments(self, row: int) -> Tensor:
        """Return the moments of a sample."""
        content = self._pages.read(_SHAPE.size + self._samples + row * self._size, self._size)
        return torch.from_numpy(np.frombuffer(content, "<f4").reshape(self._shape).copy())


@dataclass(frozen=True)
class LatentChunks:
    """The files of one set of latents, in a folder named after their key.

    Each file has its own digests. Concurrent runs that encode the same set overwrite each other's files, perhaps with
    other last digits, so one index of all digests would be wrong in between.
    """

    folder: Path
    key: str
    samples: int

    def __len__(self) -> int:
        return -(-self.samples // PER_CHUNK)

    def path(self, chunk: int) -> Path:
        """Return the file of a chunk."""
        return self.folder / f"{chunk:06d}.latents"

    def numbers(self, chunk: int) -> range:
        """Return the sample numbers of a chunk."""
        return range(chunk * PER_CHUNK, min((chunk + 1) * PER_CHUNK, self.samples))

    def write(self, chunk: int, rows: Sequence[Tensor | None]) -> None:
        """Write the moments of a chunk, None for unreadable samples. Raise `StorageFailed` where writing fails."""
        # A chunk without a readable sample still needs a shape: one channel of means and one of log variances.
        first = next((row for row in rows if row is not None), torch.zeros(2, 1, 1))
        values = np.stack([(torch.zeros_like(first) if row is None else row).numpy() for row in rows])
        good = bytes(row is not None for row in rows)
        content = b"".join([_SHAPE.pack(*first.shape), good, values.astype("<f4").tobytes()])
        try:
            with replace_file(self.path(chunk)) as draft:
                draft.write_bytes(seal_pages(content, self._seal_key(chunk)))
        except OSError as error:
            raise build_storage_error(f"{self.path(chunk)} could not be written: {error}") from error

    def open(self, chunk: int) -> LatentFile:
        """Open a chunk; raise one of `UNUSABLE` if it is missing, incomplete or of other latents."""
        return LatentFile(self.path(chunk), self._seal_key(chunk), len(self.numbers(chunk)))

    def _seal_key(self, chunk: int) -> str:
        return f"{chunk} {self.key}"

    def is_there(self, chunk: int) -> bool:
        """Return whether a chunk has all its bytes; its values are not compared."""
        try:
            self.open(chunk)
        except UNUSABLE:
            return False
        return True

    def find_unread(self, chunk: int) -> list[int] | None:
        """Return the samples that were unreadable when a chunk was encoded; None if the chunk must be encoded.

        Every value is compared: a chunk that the disk or another program has changed is encoded again.
        """
        try:
            opened = self.open(chunk)
            rows = range(len(self.numbers(chunk)))
            if not all(bool(torch.isfinite(opened.moments(row)).all()) for row in rows):
                return None
            return [number for row, number in zip(rows, self.numbers(chunk), strict=True) if not opened.is_good(row)]
        except UNUSABLE:
            return None

    def describe(self, about: Mapping[str, str]) -> None:
        """Write what the files depend on, unless it is written already. Raise `StorageFailed` if it cannot be
        written.
        """
        path = self.folder / ABOUT
        if path.is_file():
            return
        try:
            write_json(path, {"key": self.key, "about": dict(about)})
        except OSError as error:
            raise build_storage_error(f"{path} could not be written: {error}") from error


UNUSABLE = (OSError, StorageFailed, DamagedPages)
"""Errors of a file that is missing, incomplete, damaged or of other latents."""


def build_storage_error(given: str) -> StorageFailed:
    """Return the error for a cache folder that cannot be written."""
    return StorageFailed(
        given,
        allowed="a writable cache folder, with room for the latents",
        do="make room, or set XDG_CACHE_HOME to a folder on a larger disk, or write data.cache_latents=false",
    )


FOLDER = "latents"
MOST_OPEN = 64
"""How many files a process keeps open at once."""
FAIR = 4096
"""How many samples are enough to estimate a standard deviation, where moments need only be read."""
SPARE = 1.05
"""Disk space against the size of the values: files have headers, and the disk has other users."""


class CachedLatents:
    """The cached moments of samples by number. Files are opened on first read, so the object can be sent to workers."""

    def __init__(self, chunks: LatentChunks, notes: list[str]) -> None:
        self.chunks, self.notes = chunks, notes
        self._opened: dict[int, LatentFile] = {}

    def __len__(self) -> int:
        return self.chunks.samples

    def __getstate__(self) -> dict[str, object]:
        # Each worker opens the files that it reads.
        return {**vars(self), "_opened": {}}

    def moments(self, number: int) -> Tensor | None:
        """Return the moments of a sample in fp32; None if it could not be read when the set was encoded.

        Raise `BadData` if the file is gone or was changed.
        """
        chunk, row = divmod(number, PER_CHUNK)
        try:
            opened = self._open(chunk)
            if not opened.is_good(row):
                return None
            moments = opened.moments(row)
        except UNUSABLE as error:
            raise self._failed(chunk, str(error) or "its content has changed since it was written") from error
        if not bool(torch.isfinite(moments).all()):
            raise self._failed(chunk, f"it contains numbers that are not finite, in row {row}")
        return moments

    def _failed(self, chunk: int, why: str) -> BadData:
        return BadData(
            f"{self.chunks.path(chunk)} cannot be read any more: {why}",
            allowed="latents that stay unchanged while a run uses them",
            do="start the run again with the same command: missing and damaged latents are encoded again",
        )

    def spread(self, most: int = FAIR) -> Iterator[Tensor]:
        """Yield the moments of samples spread evenly over the source; each rank yields its share."""
        for number in select_spaced_numbers(len(self), most)[distributed.rank() :: distributed.count_ranks()]:
            moments = self.moments(number)
            if moments is not None:
                yield moments

    def _open(self, chunk: int) -> LatentFile:
        if chunk not in self._opened:
            if len(self._opened) >= MOST_OPEN:
                # Dicts keep insertion order: the file opened first is closed.
                del self._opened[next(iter(self._opened))]
            self._opened[chunk] = self.chunks.open(chunk)
        return self._opened[chunk]


def load_or_encode_latents(
    encoding: MomentEncoder, source: Source, *, parts: Mapping[str, str], on_progress: OnProgress = ignore_progress
) -> CachedLatents:
    """Find the cached latents of a source and encode the missing ones. Collective: every rank calls it and shares the
    work.

    `parts` are the inputs of the latents other than the data: the autoencoder's digest, the `format` it computes in,
    the size of the images. `on_progress` receives the progress on rank 0. Raise `BadData`, `StorageFailed`, or
    `NotBegun` on a signal.
    """
    source = complete_source(source)
    # The key must be equal on all ranks, or each would look for another folder.
    words = distributed.run_on_rank_zero(lambda: collect_key_parts(encoding, source, parts))
    key = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()
    chunks = LatentChunks(find_cache_folder() / FOLDER / key, key, len(source))
    lacking = distributed.run_and_gather_results(lambda: _list_missing_chunks(encoding, source, chunks))
    missing = sorted({chunk for some in lacking for chunk in some})
    encoder = ChunkEncoder(encoding, source, chunks, parts["format"], on_progress)
    encoder.fill(missing, distributed.rank(), distributed.count_ranks())
    # Hosts without a shared disk see only what their own ranks wrote; each host encodes what it lacks.
    unseen = distributed.run_and_gather_results(lambda: [chunk for chunk in missing if not chunks.is_there(chunk)])
    encoder.fill(unseen[distributed.rank()], *resolve_local_ranks())
    # Rank 0 writes the description; on hosts that do not see its disk, the first local rank does.
    distributed.run_and_gather_results(lambda: chunks.describe(words) if distributed.rank() == 0 else None)
    distributed.run_and_gather_results(lambda: chunks.describe(words) if resolve_local_ranks()[0] == 0 else None)
    encoded = len(missing)
    what = f"{encoded} of {len(chunks)} files encoded now" if encoded else "found, nothing encoded"
    return CachedLatents(chunks, [f"latents of {chunks.samples:,} samples in {chunks.folder}: {what}"])


class ChunkEncoder:
    """Encodes missing chunks, one per rank and turn, so that all ranks learn at once of one that failed."""

    def __init__(
        self, encoding: MomentEncoder, source: Source, chunks: LatentChunks, computed_in: str, on_progress: OnProgress
    ) -> None:
        self.encoding, self.source, self.chunks, self.computed_in = encoding, source, chunks, computed_in
        # One progress bar for all ranks.
        self.on_progress = on_progress if distributed.rank() == 0 else ignore_progress

    def fill(self, missing: list[int], rank: int, size: int) -> None:
        """Encode `missing`; collective. Each rank encodes every `size`-th chunk, starting at `rank`."""
        # Every rank takes the same number of turns, even with nothing to encode: each turn is a collective.
        turns = max(distributed.run_and_gather_results(lambda: -(-len(missing) // size)))
        if not turns:
            return
        distributed.run_and_gather_results(lambda: self._check_disk_space(missing))
        mine, samples = missing[rank::size], len(self._numbers(missing))
        with closing(self.encoding.rows(self.source, self._numbers(mine))) as rows:
            for turn in range(turns):
                signals = distributed.run_and_gather_results(lambda turn=turn: self._next(mine[turn : turn + 1], rows))  # type: ignore[misc]
                self.on_progress(samples * (turn + 1) // turns, samples)
                _check_stop_signals(signals, self.chunks)

    def _check_disk_space(self, missing: list[int]) -> None:
        """Raise `StorageFailed` before encoding where the disk has no room."""
        if not missing:
            return
        example = torch.zeros(1, *self.encoding.shape(self.source), device=self.encoding.device)
        samples = len(self._numbers(missing))
        needed = int(samples * self.encoding.moments(example)[0].numel() * 4 * SPARE)
        folder = self.chunks.folder
        # The folder may not exist yet: the nearest existing parent is on the same disk.
        free = shutil.disk_usage(next(place for place in folder.parents if place.is_dir())).free
        if needed > free:
            text = f"the latents of {samples:,} samples take {in_words(needed)} in {folder}"
            raise build_storage_error(f"{text}, and the disk has {in_words(free)} left")

    def _numbers(self, chunks: list[int]) -> list[int]:
        return [number for chunk in chunks for number in self.chunks.numbers(chunk)]

    def _next(self, chunks: list[int], rows: Iterator[tuple[int, Tensor | None]]) -> str | None:
        """Encode and write chunks; return the signal by which this rank was asked to stop."""
        for chunk in chunks:
            found = [next(rows) for _ in self.chunks.numbers(chunk)]
            for number, moments in found:
                self._finite(number, moments)
            self.chunks.write(chunk, [moments for _, moments in found])
        return find_stop_signal()

    def _finite(self, number: int, moments: Tensor | None) -> None:
        if moments is None or bool(torch.isfinite(moments).all()):
            return
        island = "keep the autoencoder in fp32: write model.autoencoder_island=frozen"
        weights = "use an autoencoder from before it diverged, or train it again"
        raise BadData(
            f"{self.source.name(number)}: its latents, encoded in {self.computed_in}, are not finite",
            allowed="finite latents; cached ones would spoil every run that uses the cache",
            do=weights if self.computed_in == "fp32" else island,
        )


def _list_missing_chunks(encoding: MomentEncoder, source: Source, chunks: LatentChunks) -> list[int]:
    """Return the chunks that must be encoded, among those this rank has to check on its host."""
    first, step = resolve_local_ranks()

    def serves(chunk: int) -> bool:
        unread = chunks.find_unread(chunk)
        return unread is not None and not any(map(is_good_now, unread))

    def is_good_now(number: int) -> bool:
        # A temporary disk error must not exclude a sample forever: try it again in every run.
        return read_finite_image(source, number, encoding.image_of) is not None

    return [chunk for chunk in range(first, len(chunks), step) if not serves(chunk)]


def _check_stop_signals(signals: list[str | None], chunks: LatentChunks) -> None:
    """Raise `NotBegun` on all ranks where one of them was asked to stop; the chunks written so far remain."""
    signal = next(filter(None, signals), None)
    if signal is not None:
        raise NotBegun(
            f"stopped by {signal} while encoding latents; finished ones are kept in {chunks.folder}",
            do="start it again with the same command: only missing latents are encoded",
        )


class LatentSource(WrappedSource):
    """The samples of a source; once `latents` is set, each has `moments` instead of `image`, and the image is not read.

    A run creates its sources before the model and encodes after it: `latents` is set in between. Workers start later
    and receive the object in its final state. Names and files are the underlying source's: the data's fingerprint must
    not depend on the cache.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.latents: CachedLatents | None = None

    def read(self, index: int) -> Sample:
        """Return a sample with its moments. Raise `BadSample` if it has none."""
        if self.latents is None:
            return self.source.read(index)
        moments = self.latents.moments(index)
        if moments is None:
            self.source.read(index)  # raises the precise error
            raise BadSample(self.name(index), "it has no latents: it could not be read when they were encoded")
        return {**self.source.without_image(index), "moments": moments}

    def without_image(self, index: int) -> Sample:
        """Return a sample without decoding its image."""
        return self.source.without_image(index)
