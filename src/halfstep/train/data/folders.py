"""Folders of images: all that lie below one, or the layout of ImageNet, a folder per class with images in it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from halfstep.errors import BadData
from halfstep.train.data.listing import existing, folders, image_files
from halfstep.train.data.reading import read_image
from halfstep.train.data.source import Files, Sample

_LAYOUT = "ROOT/CLASS/IMAGE, with at least one image in each class"


class _Listed:
    """Image files below a folder, by number."""

    root: Path
    channels: int
    _files: list[str]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> Sample:
        return {"image": read_image(self.root / self._files[index], self.channels), **self.without_image(index)}

    def without_image(self, index: int) -> Sample:
        return {}

    def name(self, index: int) -> str:
        return str(self.root / self._files[index])

    def key(self, index: int) -> str:
        return Path(self._files[index]).as_posix()

    def files_of(self, index: int) -> Files:
        return [(self.key(index), os.path.join(self.root, self._files[index]))]


class Images(_Listed):
    """`image` as it was read, of every image below a folder, however deep."""

    def __init__(self, root: str | Path, channels: int = 3) -> None:
        self.root, self.channels = existing(root, "the image folder"), channels
        self._files = image_files(self.root)
        if not self._files:
            raise BadData(f"{self.root} holds no image", allowed="at least one image below it", do="check data.path")


class ImageFolder(_Listed):
    """`image` as it was read, and `label`: the position of its folder's name among the sorted names.

    Give `classes` the names of the training set to read a validation folder, so that both number them alike.
    """

    def __init__(self, root: str | Path, channels: int = 3, classes: list[str] | None = None) -> None:
        self.root, self.channels = existing(root, "the image folder"), channels
        present = folders(self.root)
        if not present:
            raise BadData(f"{self.root} holds no folder per class", allowed=_LAYOUT, do="check data.path")
        self.classes = list(present if classes is None else classes)
        unknown = sorted(set(present) - set(self.classes))
        if unknown:
            raise BadData(
                f"{self.root} holds the class {unknown[0]!r}, which the training set has not",
                allowed=", ".join(self.classes[:20]),
                do="remove the folder, or add it to the training set",
            )
        self._files, self._labels = self._find(present)

    def _find(self, present: list[str]) -> tuple[list[str], list[int]]:
        files: list[str] = []
        labels: list[int] = []
        for name in present:
            found = image_files(self.root, name)
            if not found:
                raise BadData(f"{self.root / name} holds no image", allowed=_LAYOUT, do="fill or remove this folder")
            files += found
            labels += [self.classes.index(name)] * len(found)
        return files, labels

    def without_image(self, index: int) -> Sample:
        return {"label": torch.tensor(self._labels[index])}
