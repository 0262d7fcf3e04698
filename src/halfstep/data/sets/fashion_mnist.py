"""Provide Fashion-MNIST: 70,000 gray pictures of clothes, 28 × 28 pixels, in ten classes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from halfstep.data.sets.downloads import OnSample, RemoteFile, build_archive_error, write_shards
from halfstep.status_line import OnProgress

ABOUT = "Fashion-MNIST: gray pictures of 28 px, 10 classes; WebDataset shards (31 MB download)"
_HOST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"  # the publisher's own, which has no https
FILES = tuple(
    RemoteFile(f"{_HOST}/{name}-ubyte.gz", size, sha256)
    for name, size, sha256 in (
        ("train-images-idx3", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    )
)
COUNTS = {"train": 60_000, "val": 10_000}
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
LARGEST = 16 + 60_000 * 28 * 28
"""The bytes of the largest file when it is unpacked."""


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the four files."""
    for file in FILES:
        file.fetch(folder, on_progress)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the pictures to `into` as shards."""
    from torchvision.datasets import FashionMNIST  # type: ignore[import-untyped]

    raw = into.parent / "unpacked" / "FashionMNIST" / "raw"  # where torchvision looks
    raw.mkdir(parents=True)
    for file in FILES:
        _unpack_gzip(downloads / file.name, raw / file.name.removesuffix(".gz"))
    for split in COUNTS:
        pictures = FashionMNIST(raw.parent.parent, train=split == "train")
        write_shards(into / split, zip(pictures.data.numpy(), pictures.targets.tolist(), strict=True), on_sample)
    (into / "classes.txt").write_text("\n".join(CLASSES) + "\n")


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each split."""
    from halfstep.data.shards import Shards

    return {split: len(Shards(folder / split, channels=1)) for split in COUNTS}


def _unpack_gzip(packed: Path, to: Path) -> None:
    try:
        with gzip.open(packed) as file:
            content = file.read(LARGEST + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise build_archive_error(f"{packed.name} cannot be read: {error}") from None
    if len(content) > LARGEST:
        raise build_archive_error(f"{packed.name} has more than {LARGEST:,} bytes unpacked")
    to.write_bytes(content)
