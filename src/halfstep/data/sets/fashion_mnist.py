"""Provide Fashion-MNIST: 70,000 gray pictures of clothes, 28 × 28 pixels, in ten classes."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.data.sets.packages import Bar, Debian, DownloadFailed, write_shards

ABOUT = "Fashion-MNIST: grey pictures of 28 px, 10 classes; WebDataset shards (31 MB download)"
PACKAGE = Debian("dataset-fashion-mnist", "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0")
COUNTS = {"train": 60_000, "val": 10_000}
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_FILES = {"train": "train", "val": "t10k"}


def make(archive: Path, into: Path, bar: Bar) -> None:
    """Write `archive` to `into` as shards; raise DownloadFailed without dpkg-deb."""
    if shutil.which("dpkg-deb") is None:
        raise DownloadFailed(
            "dpkg-deb is needed to open a Debian package", allowed="a machine that has it", do="install dpkg first"
        )
    with tempfile.TemporaryDirectory(dir=into.parent) as unpacked:
        subprocess.run(["dpkg-deb", "--extract", str(archive), unpacked], check=True)
        inside = Path(unpacked) / "usr/share/datasets/fashion-mnist"
        for split, name in _FILES.items():
            images = _idx(inside / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
            labels = _idx(inside / f"{name}-labels-idx1-ubyte.gz", 8)
            write_shards(into / split, zip(images, labels.tolist(), strict=True), bar)
    (into / "classes.txt").write_text("\n".join(CLASSES) + "\n")


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each split."""
    from halfstep.data.shards import Shards

    return {split: len(Shards(folder / split, channels=1)) for split in COUNTS}


def _idx(path: Path, header: int) -> Any:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)
