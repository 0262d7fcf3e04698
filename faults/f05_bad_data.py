"""Data that is missing, empty or not what the task needs: said by name before the first step, and nothing is saved."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import halfstep
from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.errors import HalfstepError

ID = "F05"
WHAT = "missing, empty or wrong data ends the run with 65 and the sample's path, before any step"
REFUSED, LATEST = 65, 5.0
COUNT, SIZE = 12, (32, 32)
FIFTH, ANY = "05.png", r"\d\d\.png"


@dataclass(frozen=True)
class Set:
    """A data set with one thing wrong, and what must be said of it."""

    spoil: Callable[[Path], object]
    named: str
    """A regular expression."""
    recipe: str = "segmentation_tiny"
    late: bool = False
    """Whether it is one sample among good ones: then it is found when it is read, which may be after a step."""


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    slowest = 0.0
    with rig.scratch() as folder:
        _launched(folder / "warm", _made(folder / "good", "segmentation_tiny"), "segmentation_tiny")
        for name, one in SETS.items():
            root = _made(folder / name.replace(" ", "-"), one.recipe)
            one.spoil(root)
            trials[name], seconds = _refused(folder / f"run-{name.replace(' ', '-')}", root, one)
            slowest = max(slowest, seconds)
    return outcome(trials, f"refused after {slowest:.2f}s")


def _refused(run: Path, root: Path, one: Set) -> tuple[str | None, float]:
    began = time.process_time()
    code, said = _launched(run, root, one.recipe)
    seconds = time.process_time() - began
    wrong = first_wrong(
        (f"exit code {code}: {said}", lambda: code == REFUSED),
        (f"it is named: {said}", lambda: re.search(one.named, said) is not None),
        ("nothing is saved", lambda: one.late or not (run / CHECKPOINTS).exists()),
        (f"after {seconds:.1f} s", lambda: seconds <= LATEST),
    )
    return wrong, seconds


def _launched(run: Path, root: Path, recipe: str) -> tuple[int, str]:
    settings: dict[str, Any] = {
        "run.dir": str(run),
        "data.name": "pairs" if recipe == "segmentation_tiny" else "folder",
        "data.path": str(root),
        "precision": "fp32",
        "train.epochs": 1,
        "run.pictures": 0,
    }
    try:
        halfstep.fit(recipe, settings=settings, quiet=True)
    except HalfstepError as error:
        return error.exit_code, str(error)
    return 0, ""


# -- sets ------------------------------------------------------------------------------------------------------------


def _made(root: Path, recipe: str) -> Path:
    for number in range(COUNT):
        if recipe == "segmentation_tiny":
            _picture(root / "images" / f"{number:02d}.png", number)
            _mask(root / "masks" / f"{number:02d}.png")
        else:
            _picture(root / ("cat", "dog")[number % 2] / f"{number:02d}.png", number)
    return root


def _picture(path: Path, seed: int, size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)).save(path)


def _mask(path: Path, values: tuple[int, ...] = (0, 1), size: tuple[int, int] = SIZE) -> None:
    pixels = np.full(size, values[0], np.uint8)
    for number, value in enumerate(values[1:]):
        pixels[4 + 4 * number : 8 + 4 * number, 4:20] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _removed(folder: Path) -> None:
    _emptied(folder)
    folder.rmdir()


def _in_color(path: Path) -> None:
    pixels = np.zeros((*SIZE, 3), np.uint8)
    pixels[5:9, 5:9] = (200, 10, 10)
    Image.fromarray(pixels).save(path)


def _each(root: Path, spoil: Callable[[Path], None]) -> None:
    for path in (root / "masks").iterdir():
        spoil(path)


SETS = {
    "no such folder": Set(lambda root: root.rename(root.with_name("elsewhere")), "no-such-folder"),
    "nothing in it": Set(lambda root: (_emptied(root / "images"), _emptied(root / "masks")), "images"),
    "no masks": Set(lambda root: _removed(root / "masks"), "masks"),
    "an image without a mask": Set(lambda root: (root / "masks" / FIFTH).unlink(), FIFTH),
    "labels out of range": Set(lambda root: _each(root, lambda path: _mask(path, (0, 7))), ANY),
    "masks of another shape": Set(lambda root: _each(root, lambda path: _mask(path, size=(20, 24))), ANY),
    "masks in color": Set(lambda root: _each(root, _in_color), ANY),
    "a label out of range": Set(lambda root: _mask(root / "masks" / FIFTH, (0, 7)), FIFTH, late=True),
    "a mask of another shape": Set(lambda root: _mask(root / "masks" / FIFTH, size=(20, 24)), FIFTH, late=True),
    "a mask in color": Set(lambda root: _in_color(root / "masks" / FIFTH), FIFTH, late=True),
    "a class without images": Set(lambda root: _emptied(root / "dog"), "dog", "classification_tiny"),
    "no classes": Set(
        lambda root: (_removed(root / "dog"), _removed(root / "cat")), "no-classes", "classification_tiny"
    ),
    "a file in place of the folder": Set(
        lambda root: (root.rename(root.with_name("moved")), root.write_text("x")), "a-file-in-place"
    ),
}
