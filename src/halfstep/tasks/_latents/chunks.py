"""Files of latents, some hundred samples in each: written whole or not at all, and looked at before they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfstep.errors import BadData, StorageFailed
from halfstep.files import write_json
from halfstep.tensor_header import content
from halfstep.train.weights import save_weights

PER_CHUNK = 256
ABOUT = "about.json"
"""What the files beside it depend on, for people: halfstep itself looks at the files alone."""
MOMENTS, GOOD = "moments", "good"


@dataclass(frozen=True)
class Chunks:
    """The files of one set of latents, in a folder that is named after what they depend on.

    Each file says itself what its numbers must be. Runs that encode the same set at once replace one another's files,
    perhaps with other last digits, and a list of them all would be wrong in between.
    """

    folder: Path
    key: str
    samples: int

    def __len__(self) -> int:
        return -(-self.samples // PER_CHUNK)

    def path(self, chunk: int) -> Path:
        return self.folder / f"{chunk:06d}.safetensors"

    def numbers(self, chunk: int) -> range:
        """Those of the samples in a chunk."""
        return range(chunk * PER_CHUNK, min((chunk + 1) * PER_CHUNK, self.samples))

    def write(self, chunk: int, rows: Sequence[Tensor | None]) -> None:
        """Moments that are finite; None for samples that could not be read."""
        first = next((row for row in rows if row is not None), torch.zeros(2, 1, 1))
        moments = torch.stack([torch.zeros_like(first) if row is None else row for row in rows])
        good = torch.tensor([row is not None for row in rows])
        about = {"key": self.key, "chunk": str(chunk), "sha256": _digest(moments, good)}
        try:
            save_weights({MOMENTS: moments, GOOD: good}, self.path(chunk), about)
        except (OSError, SafetensorError) as error:
            raise no_room(f"{self.path(chunk)} could not be written: {error}") from error

    def open(self, chunk: int) -> Any:
        """The file, mapped into memory; SafetensorError or OSError where it is not whole, BadData where not ours."""
        opened = safe_open(self.path(chunk), "pt")  # type: ignore[no-untyped-call]
        about = opened.metadata() or {}
        if (about.get("key"), about.get("chunk")) != (self.key, str(chunk)) or set(opened.keys()) != {MOMENTS, GOOD}:
            raise refused(self.path(chunk), "it holds other latents than its name says")
        count = len(self.numbers(chunk))
        if any(opened.get_slice(name).get_shape()[:1] != [count] for name in (MOMENTS, GOOD)):
            raise refused(self.path(chunk), f"it does not hold {count} samples")
        return opened

    def is_there(self, chunk: int) -> bool:
        """Whether a chunk has all its bytes; its numbers are not looked at."""
        try:
            self.open(chunk)
        except (OSError, SafetensorError):
            return False
        return True

    def is_whole(self, chunk: int) -> bool:
        """Whether a chunk can be used; False where it must be encoded, BadData where it is damaged or not ours.

        One that is cut off was not finished being copied; one with all its bytes and other numbers in it was changed
        by somebody.
        """
        try:
            opened = self.open(chunk)
            moments, good = opened.get_tensor(MOMENTS), opened.get_tensor(GOOD)
        except (OSError, SafetensorError):
            return False
        if not bool(torch.isfinite(moments).all()):
            raise refused(self.path(chunk), "it holds numbers that are not finite")
        if opened.metadata().get("sha256") != _digest(moments, good):
            raise refused(self.path(chunk), "its numbers have another SHA-256 than was written")
        return True

    def unread(self, chunk: int) -> list[int]:
        """The numbers of the samples that could not be read when a chunk was encoded."""
        good = self.open(chunk).get_tensor(GOOD).tolist()
        return [number for number, was_read in zip(self.numbers(chunk), good, strict=True) if not was_read]

    def describe(self, about: Mapping[str, str]) -> None:
        """Write down what the files depend on, where nobody has."""
        path = self.folder / ABOUT
        if path.is_file():
            return
        try:
            write_json(path, {"key": self.key, "about": dict(about)})
        except OSError as error:
            raise no_room(f"{path} could not be written: {error}") from error


def refused(path: Path, why: str) -> BadData:
    return BadData(
        f"{path} is not used: {why}",
        allowed="latents that halfstep wrote there",
        do=f"find out who changed it, then rm {path} and start again: it is encoded anew",
    )


def no_room(given: str) -> StorageFailed:
    return StorageFailed(
        given,
        allowed="a cache folder that can be written to, with room for the latents",
        do="make room, or set XDG_CACHE_HOME to a folder on a larger disk, or write data.cache_latents=false",
    )


def _digest(moments: Tensor, good: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(moments.shape)}".encode())
    for tensor in (moments, good):
        digest.update(content(tensor))
    return digest.hexdigest()
