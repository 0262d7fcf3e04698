"""Provide CIFAR-10: 60,000 photographs of 32 × 32 pixels in ten classes, from its binary archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.data.sets.downloads import OnSample, RemoteFile, build_archive_error, read_members, write_shards
from halfstep.status_line import OnProgress

ABOUT = "CIFAR-10: photographs of 32 px, 10 classes; WebDataset shards (170 MB download)"
# The archive for Python is a pickle; this one has records of a label and 3 × 32 × 32 bytes.
ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
COUNTS = {"train": 50_000, "val": 10_000}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "val": ["test_batch.bin"]}
_INSIDE, _RECORD, _PER_FILE = "cifar-10-batches-bin/", 1 + 3 * 32 * 32, 10_000


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the archive."""
    ARCHIVE.fetch(folder, on_progress)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the photographs to `into` as shards."""
    wanted = {f"{_INSIDE}{name}" for names in _FILES.values() for name in names}
    content = dict(read_members(downloads / ARCHIVE.name, wanted.__contains__, _RECORD * _PER_FILE))
    if missing := sorted(wanted - content.keys()):
        raise build_archive_error(f"{ARCHIVE.name} has no {missing[0]}")
    for split, names in _FILES.items():
        write_shards(into / split, _iterate_samples([content[f"{_INSIDE}{name}"] for name in names]), on_sample)
    (into / "classes.txt").write_text("\n".join(CLASSES) + "\n")


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each split."""
    from halfstep.data.shards import Shards

    return {split: len(Shards(folder / split)) for split in COUNTS}


def _iterate_samples(files: list[bytes]) -> Iterator[tuple[Any, int]]:
    for file in files:
        if len(file) % _RECORD:
            raise build_archive_error(
                f"{ARCHIVE.name} has a file of {len(file):,} bytes, not of records of {_RECORD:,}"
            )
        records = np.frombuffer(file, np.uint8).reshape(-1, _RECORD)
        if records[:, 0].max(initial=0) >= len(CLASSES):
            raise build_archive_error(f"{ARCHIVE.name} has the class number {records[:, 0].max()}")
        images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        yield from zip(images, records[:, 0].tolist(), strict=True)
