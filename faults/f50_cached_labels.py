"""The cached index of a shard is edited, or is of a shard that was since written in place."""

from __future__ import annotations

import io
import os
import random
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.data import shard_index
from halfstep.data.dataset import BadSample
from halfstep.data.file_state import FileState
from halfstep.data.shard_index import pack_shard_rows
from halfstep.data.shard_rows import LARGEST_LABEL, ShardRows
from halfstep.data.shard_scan import scan_shard
from halfstep.data.shards import Shards, build_shard_set
from halfstep.errors import BadData

ID = "F50"
WHAT = "labels of a shard come from the shard: an edited or foreign index changes no label and uses no extra memory"
LABELS = [number % 2 for number in range(8)]
TURNED = [1 - label for label in LABELS]
EDITS, FULL_EDITS = 12, 400
HUGE = (999_999_999_999, 1_000_001, -2)
SEAL = 16
"""Bytes of the digest of the only page."""
COLUMNS = ("image", "image_size", "label", "place", "digest", "mask", "mask_size", "label_at")
Edit = Callable[[ShardRows], ShardRows]


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    with rig.scratch() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        for name, edit in _edits(FULL_EDITS if full else EDITS).items():
            for sealed in (False, True):
                trials[f"{name}{', sealed anew' * sealed}"] = _edited(folder, edit, sealed)
        trials["written in place, with its old times"] = _rewritten(folder)
        trials["a file system whose times mean nothing"] = _timeless(folder)
    return outcome(trials, "no label turned")


def write_shard(path: Path, labels: list[int], color: int = 0) -> Path:
    """Write samples of eight by eight pixels: bitmaps, so that every color has the same size."""
    with tarfile.open(path, "w") as archive:
        for number, label in enumerate(labels):
            image = io.BytesIO()
            Image.new("RGB", (8, 8), (color, number, 0)).save(image, "BMP")
            for kind, content in (("bmp", image.getvalue()), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:04d}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def _edits(count: int) -> dict[str, Edit]:
    """Return what is done to the columns of an index: labels turned, and one number of one column replaced."""
    edits: dict[str, Edit] = {"all labels turned": lambda rows: replace(rows, label=1 - rows.label)}
    random_ = random.Random(50)
    numbers = [*HUGE, 0, 1, 512, 10**6, 10**18]
    for _ in range(count):
        column, place = random_.choice(COLUMNS), random_.randrange(len(LABELS))
        number = random_.choice(numbers)
        edits[f"{column} of sample {place} is {number}"] = _replaced(column, place, number)
    return edits


def _replaced(column: str, place: int, number: int) -> Edit:
    def edit(rows: ShardRows) -> ShardRows:
        values = getattr(rows, column).astype(np.int64)
        values[place] = number
        return replace(rows, **{column: values})

    return edit


def _edited(folder: Path, edit: Edit, sealed: bool) -> str | None:
    shard = write_shard(folder / "a.tar", LABELS)
    Shards(shard)
    kept = max((folder / "cache" / "halfstep" / "shards").glob("*.index"), key=lambda path: path.stat().st_mtime_ns)
    real = scan_shard(shard)
    other = edit(real)
    if sealed:
        with mock.patch.object(shard_index, "scan_shard", return_value=other):
            shard_index.scan_and_write_index(build_shard_set(shard), kept, lambda done, of: None)
    else:
        rows = pack_shard_rows(real).content[:-SEAL]
        kept.write_bytes(kept.read_bytes().replace(rows, pack_shard_rows(other).content[: len(rows)]))
    return _own_labels(shard, LABELS)


def _own_labels(shard: Path, labels: list[int]) -> str | None:
    """Return None where every sample has its own label, or is refused by name."""
    try:
        source = Shards(shard)
    except BadData as error:
        return None if shard.name in str(error) else f"refused without its name: {error}"
    read = [_label(source, number) for number in range(len(source))]
    wrong = [(number, found) for number, found in enumerate(read) if found not in (labels[number], None)]
    return first_wrong(
        (f"labels {wrong}", lambda: not wrong),
        ("as many samples", lambda: len(read) == len(labels)),
        # An index with a right digest may claim the largest label that a shard may have; reading that sample fails.
        ("classes within their bound", lambda: len(source.classes) <= LARGEST_LABEL + 1),
    )


def _label(source: Shards, number: int) -> int | None:
    try:
        return int(source.read(number)["label"])
    except (BadData, BadSample):
        return None


def _rewritten(folder: Path) -> str | None:
    shard = write_shard(folder / "b.tar", LABELS)
    Shards(shard)
    status = shard.stat()
    time.sleep(0.02)  # the time of a change has the resolution of the kernel's clock
    _write_over(shard, write_shard(folder / "other", TURNED))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    return _own_labels(shard, TURNED)


def _write_over(shard: Path, other: Path) -> None:
    with open(shard, "r+b") as file:
        file.write(other.read_bytes())


def _timeless(folder: Path) -> str | None:
    def of(status: os.stat_result) -> FileState:
        return FileState(status.st_size, 1, 1, 1)

    shard = write_shard(folder / "c.tar", LABELS)
    with mock.patch.object(FileState, "of", of):
        Shards(shard)
        _write_over(shard, write_shard(folder / "other", TURNED))
        return _own_labels(shard, TURNED)
