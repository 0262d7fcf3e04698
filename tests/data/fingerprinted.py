"""Sources for the tests of fingerprints, and shorthands."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

from faults.bad_images import encoded, picture
from halfstep.data.dataset import BadSample, Files, Sample
from halfstep.data.fingerprint import Fingerprint, SourcePrint
from halfstep.data.folders import ImageMaskPairs, resolve_pair_folders


class Own:
    """Somebody's own source: files in a folder, in the order given."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root, self.names = root, names

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Sample:
        return {"image": torch.tensor(list((self.root / self.names[index]).read_bytes()))}

    def name(self, index: int) -> str:
        return str(self.root / self.names[index])


class OwnFiled(Own):
    def files_of(self, index: int) -> Files:
        return [(self.names[index], self.root / self.names[index])]


class Many:
    """Names only, as many as are wanted."""

    def __init__(self, count: int, made: Callable[[int], str] = "{:07d}".format) -> None:
        self.count, self.made = count, made

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Sample:
        raise BadSample(self.name(index), "there is none")

    def name(self, index: int) -> str:
        return self.made(index)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def opened(root: Path) -> ImageMaskPairs:
    return ImageMaskPairs(*resolve_pair_folders(root))


def only(found: Fingerprint) -> SourcePrint:
    (part,) = found.parts
    return part


def round_trip(found: Fingerprint) -> Fingerprint:
    return Fingerprint.from_dict(json.loads(json.dumps(found.as_dict())))


def shard(path: Path, numbers: range) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for n in numbers:
            for name, content in ((f"{n:04d}.png", encoded(picture(n))), (f"{n:04d}.cls", str(n % 3).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def images_and_masks(folder: Path) -> Path:
    """Six pictures with their masks."""
    for n in range(6):
        put(folder / "images" / f"{n}.png", encoded(picture(n)))
        put(folder / "masks" / f"{n}_mask.png", encoded(picture(n, 8)))
    return folder
