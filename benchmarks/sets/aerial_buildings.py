"""Provide aerial photographs of buildings: 587 crops of 12 orthophotos, with a mask of every building.

The package has one polygon per crop, that of the building in its center. The masks here are drawn from the polygons of
the whole orthophoto, so that neighbors at the edge of a crop are buildings too. Crops of one orthophoto overlap, so
the validation set consists of whole orthophotos that are not in the training set.
"""

from __future__ import annotations

import csv
import io
import re
import tarfile
from collections import defaultdict
from pathlib import Path, PurePosixPath

from PIL import Image, ImageDraw

from benchmarks.sets.packages import PyPI, member_bytes
from halfstep.data.sets.downloads import OnSample
from halfstep.status_line import OnProgress

ABOUT = "Aerial photographs of 224 px with masks of buildings; images/ and masks/ (78 MB download)"
PACKAGE = PyPI(
    "pytorch-segmentation-models-trainer",
    "1.4.0",
    "0aaa2f4d97fc38ef345464460fc81ba5c51716cf5285a02eb2d062e76759ee36",
    kind="source",
)
COUNTS = {"train": 469, "val": 118}
VALIDATION = ("Ortoimagem_MI_2970-1-SO_998", "Ortoimagem_MI_2970-1-SO_970", "Ortoimagem_MI_2970-1-SO_1036")
_INSIDE = "pytorch_segmentation_models_trainer-1.4.0/tests/testing_data/data/polygon_rnn_data"
_SIZE = 224

Polygon = list[tuple[float, float]]


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the package."""
    PACKAGE.fetch(folder)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the images and masks to `into`."""
    for split in COUNTS:
        for kind in ("images", "masks"):
            (into / split / kind).mkdir(parents=True)
    with tarfile.open(PACKAGE.fetch(downloads), "r:gz") as package:
        content = {m.name.removeprefix(f"{_INSIDE}/"): member_bytes(package, m) for m in package if _wanted(m)}
    rows = list(csv.DictReader(io.StringIO(content["polygonrnn_dataset.csv"].decode())))
    buildings = defaultdict(list)
    for row in rows:
        buildings[row["original_image_path"]].append(_rings(row["original_polygon_wkt"]))
    for row in rows:
        _write(into, row, content[row["image"]], buildings[row["original_image_path"]])
        on_sample()


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each split."""
    from halfstep.data.folders import ImageMaskPairs, resolve_pair_folders

    return {split: len(ImageMaskPairs(*resolve_pair_folders(folder / split))) for split in COUNTS}


def _wanted(member: tarfile.TarInfo) -> bool:
    inside = member.isfile() and member.name.startswith(f"{_INSIDE}/")
    return inside and ("/images_croped/" in member.name or member.name.endswith("_dataset.csv"))


def _rings(text: str) -> list[Polygon]:
    """Return the outer ring of a WKT polygon, then its holes."""
    return [
        [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+(?:e-?\d+)?) (-?[\d.]+(?:e-?\d+)?)", ring)]
        for ring in re.findall(r"\(([^()]+)\)", text)
    ]


def _write(into: Path, row: dict[str, str], image: bytes, buildings: list[list[Polygon]]) -> None:
    photo, number = PurePosixPath(row["image"]).parts[-2:]
    folder = into / ("val" if photo in VALIDATION else "train")
    (folder / "images" / f"{photo}_{number}").write_bytes(image)
    mask = crop_mask(buildings, row)
    mask.save(folder / "masks" / f"{photo}_{number}")


def crop_mask(buildings: list[list[Polygon]], row: dict[str, str]) -> Image.Image:
    """Return a mask of 0 and 255 with every building of the orthophoto that lies in this crop."""
    left, top = float(row["min_col"]), float(row["min_row"])
    wide, high = float(row["scale_w"]), float(row["scale_h"])
    mask = Image.new("L", (_SIZE, _SIZE))
    draw = ImageDraw.Draw(mask)
    for rings in buildings:
        for number, ring in enumerate(rings):
            draw.polygon([((x - left) * wide, (y - top) * high) for x, y in ring], fill=0 if number else 255)
    return mask
