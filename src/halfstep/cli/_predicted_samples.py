"""Pictures that a run's model makes by itself, in one grid."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.cli._predicted_place import writing
from halfstep.errors import BadData, WrongUse

if TYPE_CHECKING:
    from halfstep.tasks._finished import Finished
    from halfstep.train.task import Picture

PICTURE = "samples.png"
LEAST = 64
"""The height that small pictures are enlarged to, in pixels."""
COLUMNS = 10
WIDEST = 2400
"""A picture of more pixels across than this has fewer columns, unless they were asked for."""


def drawn(finished: Finished, out: Path, *, samples: int, columns: int | None, seed: int) -> dict[str, Any]:
    """Draw samples with a seed, write them as one picture, and say where."""
    from halfstep.draw.grid import enlarged, grid
    from halfstep.draw.png import write_png

    made = [enlarged(picture, LEAST) for picture in _made(finished, samples, seed)]
    if not made:
        raise BadData(
            f"{finished.folder}: there is nothing to draw from, or none of it can be read",
            allowed="the validation data that the run was trained with",
            do=f"check data.path in its recipe, or give images: halfstep predict {finished.folder} FOLDER",
        )
    columns = columns or _columns(made, len(finished.task.facts().get("classes") or ()))
    with writing(out):
        write_png(out / PICTURE, grid([made[i : i + columns] for i in range(0, len(made), columns)]))
    return {
        "out": str(out),
        "picture": str(out / PICTURE),
        "samples": len(made),
        "columns": columns,
        "seed": seed,
        "precision": finished.choice.precision.name,
        "device": finished.choice.device.name,
    }


def _made(finished: Finished, samples: int, seed: int) -> list[Picture]:
    from halfstep.progress import progress
    from halfstep.train.randomness import seed_all
    from halfstep.train.start import generators_kept
    from halfstep.train.task import LeftOut

    inference = finished.choice.precision.inference(finished.device)
    try:
        with progress("sampling", "steps") as told, generators_kept(), inference:
            seed_all(seed)
            return finished.task.sample(finished.model, samples, told)
    except LeftOut:
        raise WrongUse(
            f"the model of {finished.folder} makes nothing by itself",
            allowed="a folder of images to predict for",
            do=f"halfstep predict {finished.folder} FOLDER",
        ) from None


def _columns(pictures: list[Picture], classes: int) -> int:
    """Ten where they fit; with classes in turn, so many that a column has one class."""
    widest: int = max(picture.shape[1] for picture in pictures)
    most = min(COLUMNS, max(1, WIDEST // widest))
    return most - most % classes if 0 < classes <= most else most
