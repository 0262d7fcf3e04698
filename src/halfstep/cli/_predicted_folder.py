"""What a run's model says about images or clips in a folder: pictures, animations and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.cli._predicted_place import writing
from halfstep.errors import BadData, WrongUse

if TYPE_CHECKING:
    from torch import Tensor

    from halfstep.tasks._finished import Finished
    from halfstep.train.task import Prediction

TABLE = "predictions.csv"
MILLISECONDS = 150
"""How long an animation shows a frame."""


@dataclass(frozen=True)
class Inputs:
    """What lies in a folder, by name, unread."""

    unit: str
    names: list[str]
    read: Callable[[int], Tensor]
    kinds: str
    """What can be read, in words."""


def predict(finished: Finished, where: Path, out: Path) -> dict[str, Any]:
    """Predict each image or clip, write what comes of it, and say where."""
    from halfstep.progress import progress
    from halfstep.train.data.source import BadSample

    inputs = _inputs(finished, where)
    rows, bad = [], []
    with progress("predicting", inputs.unit) as told:
        for number, name in enumerate(inputs.names):
            try:
                said = _predicted(finished, inputs.read(number))
            except BadSample as error:
                bad.append({"file": name, "reason": error.reason})
            else:
                with writing(out):
                    rows.append({"file": name, **_write(said, out, Path(name))})
            told(number + 1, len(inputs.names))
    if not rows:
        raise BadData(
            f"none of the {inputs.unit} below {where} could be read ({len(bad)} tried)",
            allowed=inputs.kinds,
            do=f"look at {bad[0]['file']}: {bad[0]['reason']}" if bad else f"give a folder with {inputs.unit}",
        )
    with writing(out):
        _write_table(rows, out / TABLE)
    kinds = [kind for kind in ("mask", "overlay", "animation") if any(kind in row for row in rows)]
    return {
        "out": str(out),
        inputs.unit: len(rows),
        "unreadable": bad,
        "precision": finished.choice.precision.name,
        "device": finished.choice.device.name,
        "pictures": kinds,
        "table": str(out / TABLE),
    }


def _inputs(finished: Finished, where: Path) -> Inputs:
    """Clips for a task whose data has frames, images for the others; a single image is one in either case."""
    from halfstep.train.data.listing import image_files
    from halfstep.train.data.reading import SUFFIXES, read_image

    if not where.is_dir() and not where.is_file():
        raise BadData(
            f"{where} is {'no folder and no file' if where.exists() else 'not there'}",
            allowed="a folder, or one file",
            do=f"give one that is there: halfstep predict {finished.folder} FOLDER",
        )
    data = finished.recipe.data
    if {"frames", "every"} <= set(type(data).model_fields) and where.suffix.lower() not in SUFFIXES:
        return _clips(data, where)
    root, names = (where.parent, [where.name]) if where.is_file() else (where, image_files(where))
    channels = getattr(finished.task, "channels_read", getattr(data, "channels", 3))
    kinds = "JPEG, PNG, TIFF, WEBP or BMP images"
    return Inputs("images", names, lambda number: read_image(root / names[number], channels), kinds)


def _clips(data: Any, place: Path) -> Inputs:
    """Clips of data.frames frames, one after the other."""
    from halfstep.tasks._clips import CLIPS, clips_in

    found = clips_in(place, data)
    keys = [found.key(number).rpartition("#") for number in range(len(found))]
    # A folder that is itself a clip has no name below itself.
    own = place.resolve().name
    parts = [(own if whole in ("", ".") else whole, int(first)) for whole, _, first in keys]
    return Inputs("clips", _clip_names(parts), lambda number: found.read(number)["image"], CLIPS)


def _clip_names(parts: list[tuple[str, int]]) -> list[str]:
    """With the number of the first frame; plain where a clip stands alone, unless a part of another has that name."""
    times = Counter(whole for whole, _ in parts)
    numbered = [f"{whole}-{first:05d}" for whole, first in parts]
    taken = {name for name, (whole, _) in zip(numbered, parts, strict=True) if times[whole] > 1}
    return [
        whole if times[whole] == 1 and whole not in taken else name
        for name, (whole, _) in zip(numbered, parts, strict=True)
    ]


def _predicted(finished: Finished, image: Tensor) -> Prediction:
    from halfstep.train.task import LeftOut

    try:
        with finished.choice.precision.inference(finished.device):
            return finished.task.predict(finished.model, image.to(finished.device))
    except LeftOut:
        raise WrongUse(
            f"the model of {finished.folder} says nothing about images",
            allowed="no folder",
            do=f"halfstep predict {finished.folder}, or write a predict for {type(finished.task).__name__}",
        ) from None


def _write(prediction: Prediction, out: Path, name: Path) -> dict[str, object]:
    """Pictures go to a folder of their kind, by the name of the image; the rest is a row of the table."""
    from halfstep.draw.png import write_png

    row = dict(prediction.values)
    for kind, picture in (("mask", prediction.mask), ("overlay", prediction.overlay)):
        if picture is not None:
            # The whole name, because a.jpg and a.tif may lie side by side.
            file = out / f"{kind}s" / (name if name.suffix == ".png" else name.with_name(f"{name.name}.png"))
            write_png(file, picture)
            row[kind] = str(file.relative_to(out))
    if prediction.frames:
        from halfstep.draw.gif import write_gif

        file = out / "overlays" / name.with_name(f"{name.name}.gif")
        write_gif(file, prediction.frames, MILLISECONDS)
        row["animation"] = str(file.relative_to(out))
    return row


def _write_table(rows: list[dict[str, object]], path: Path) -> None:
    import csv
    import io

    from halfstep.files import write_text

    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
