"""A hundred real photographs, no setting given: a model with its pictures in ten minutes on two cores."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.journeys.desk import Desk, crowding
from tests.journeys.terminal import Terminal

SET = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfstep" / "data" / "aerial_buildings"
PHOTOGRAPHS, MINUTES, IOU = 100, 10, 0.6


@pytest.fixture
def buildings(desk: Desk) -> Desk:
    """Every fourth or so of the training photographs, as a folder of one's own; the set's validation is elsewhere."""
    if not SET.exists():
        pytest.skip("python -m benchmarks.sets aerial_buildings")
    chosen = sorted((SET / "train" / "images").iterdir())
    chosen = [chosen[number * len(chosen) // PHOTOGRAPHS] for number in range(PHOTOGRAPHS)]
    for kind in ("images", "masks"):
        (desk.folder / "buildings" / kind).mkdir(parents=True)
    for image in chosen:
        (mask,) = (SET / "train" / "masks").glob(f"{image.stem}.*")
        shutil.copy(image, desk.folder / "buildings" / "images")
        shutil.copy(mask, desk.folder / "buildings" / "masks")
    shutil.copytree(SET / "val", desk.folder / "elsewhere")
    return desk


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_photographs_in_ten_minutes(buildings: Desk) -> None:
    began = time.monotonic()
    buildings.run("train", "segment", "--data_dir", "buildings", seconds=3000, environment={"OMP_NUM_THREADS": "2"})
    minutes = (time.monotonic() - began) / 60
    measured = buildings.run("evaluate", "runs/segment", "elsewhere", seconds=300)
    iou = figure(measured)
    print(f"{minutes:.1f} minutes, an IoU of {iou:.3f} on {len(list((SET / 'val' / 'images').iterdir()))} photographs")
    assert any((buildings.folder / "runs" / "segment" / "pictures").iterdir())
    assert iou > IOU
    assert minutes <= MINUTES * crowding()


def figure(evaluated: Terminal) -> float:
    """The IoU of what is looked for, as a person would read it: the first one that the screen has."""
    found = re.search(r"IoU\D{0,40}?(0\.\d+)", evaluated.words)
    assert found, evaluated.text
    return float(found[1])
