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
from halfstep.files import read_json, write_json
from halfstep.train.checkpoint.sealed import BLOCK, Sealed, problem_with, regular
from halfstep.train.weights import save_weights

PER_CHUNK = 256
MANIFEST = "manifest.json"
MOMENTS, GOOD = "moments", "good"


@dataclass(frozen=True)
class Chunks:
    """The files of one set of latents, in a folder that is named after what they depend on."""

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
        try:
            save_weights({MOMENTS: moments, GOOD: good}, self.path(chunk), {"key": self.key, "chunk": str(chunk)})
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

    def is_whole(self, chunk: int, sealed: Sealed | None) -> bool:
        """Whether a chunk can be used; False where it must be encoded, BadData where it is damaged or not ours.

        `sealed` is what the manifest says of it, where there is one: one that is cut off was not finished being
        copied, and one of the right size with other numbers in it was changed by somebody.
        """
        path = self.path(chunk)
        try:
            if sealed is not None and path.stat().st_size != sealed.size:
                return False
            problem = None if sealed is None else problem_with(self.folder, sealed)
            if problem is not None:
                raise refused(path, problem)
            moments = self.open(chunk).get_tensor(MOMENTS)
        except (OSError, SafetensorError):
            return False
        if not bool(torch.isfinite(moments).all()):
            raise refused(path, "it holds numbers that are not finite")
        return True

    def is_there(self, chunk: int) -> bool:
        return self.path(chunk).is_file()

    def seal(self, about: Mapping[str, str]) -> None:
        """Write down what the files are, and what they depend on: the last file of a set."""
        try:
            chunks = [{**_sealed(self.path(chunk))._asdict(), "finite": True} for chunk in range(len(self))]
            write_json(self.folder / MANIFEST, {"key": self.key, "about": dict(about), "chunks": chunks})
        except OSError as error:
            raise no_room(f"{self.folder / MANIFEST} could not be written: {error}") from error

    def unseal(self) -> None:
        """From now on files are replaced: nothing says any more what they all are."""
        try:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            raise no_room(f"{self.folder / MANIFEST} could not be removed: {error}") from error

    def sealed(self) -> list[Sealed] | None:
        """What the manifest says; None where there is none for exactly these files."""
        found = read_json(self.folder / MANIFEST)
        rows = found.get("chunks") if isinstance(found, dict) and found.get("key") == self.key else None
        if not isinstance(rows, list) or len(rows) != len(self):
            return None
        seals = [_from_row(row, self.path(chunk).name) for chunk, row in enumerate(rows)]
        return None if None in seals else [seal for seal in seals if seal is not None]


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


def _sealed(path: Path) -> Sealed:
    """What a file is now."""
    digest, size = hashlib.sha256(), 0
    with regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Sealed(path.name, size, digest.hexdigest())


def _from_row(row: Any, name: str) -> Sealed | None:
    if not isinstance(row, dict) or row.get("name") != name:
        return None
    size, sha256 = row.get("size"), row.get("sha256")
    return Sealed(name, size, sha256) if isinstance(size, int) and isinstance(sha256, str) else None
