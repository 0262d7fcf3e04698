"""Predict the images or clips of a folder with a run's model: pictures, animations and a table."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData, BadRecipe, FolderTaken, WrongUse
from halfstep.files import replace_storage_errors, write_csv
from halfstep.json_data import JsonResult
from halfstep.page import Page, Paragraph, Span
from halfstep.printable import escape_to_one_line
from halfstep.runs.left_out import LeftOutFile, build_left_out_line
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from torch import Tensor

    from halfstep.runs.finished import FinishedRun
    from halfstep.train.task import Picture, Prediction


def replace_write_errors(place: Path) -> AbstractContextManager[None]:
    """Return a context that reports an OSError as `StorageFailed` for `place`."""
    return replace_storage_errors(
        f"{place} cannot be written to",
        allowed="a writable folder with room for the predictions",
        do="give --out FOLDER, a writable path",
    )


WRITTEN = ("predictions.csv", "samples.png", "masks", "overlays", "texts")
"""Names that a prediction may write."""


def check_output_folder(place: Path, overwrite: bool) -> None:
    """Raise `FolderTaken` or `StorageFailed` for an unusable output folder before minutes of computing; create
    nothing.
    """
    there = [name for name in WRITTEN if (place / name).exists()]
    if there and not overwrite:
        raise FolderTaken(
            f"{place} already contains predictions: {', '.join(there)}",
            allowed="a folder without predictions; --overwrite replaces those of the same name, and keeps the others",
            do="give --out FOLDER, or add --overwrite",
        )
    with replace_write_errors(place):
        # The folder itself is created later; what can be checked now is its nearest existing parent.
        nearest = next(folder for folder in (place, *place.parents) if folder.exists())
        if not nearest.is_dir():
            raise OSError(errno.ENOTDIR, f"{nearest} is a file")
        if not os.access(nearest, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


HOW = (
    *("model.sampler", "model.sample_steps", "model.guidance", "model.new_tokens", "model.temperature", "model.top_k"),
    *("data.tile", "data.overlap", "data.frames", "data.every"),
)
"""Settings that the weights do not depend on. All others define the trained model."""


def split_folder_and_settings(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the folder, where the first word is one, and the settings after it."""
    first = words[0] if words else "-"
    # A folder's name may contain an equals sign.
    if first.startswith("-") or ("=" in first and not Path(first).exists()):
        return None, list(words)
    return Path(first), list(words[1:])


def change_inference_settings(finished: FinishedRun, settings: Sequence[str]) -> FinishedRun:
    """Return the run with settings changed in its recipe; its weights stay the same.

    Raise `BadRecipe` for a setting the weights depend on.
    """
    if not settings:
        return finished
    from halfstep.recipe.fields import build_recipe_fields
    from halfstep.recipe.names import PRECISION_WORDS, parse_typed_settings
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.finished import restore_task_facts
    from halfstep.runs.resolve import resolve_run_recipe
    from halfstep.train.run_folder import find_recipe_file

    schema = type(finished.task).schema
    for key in (one.key for one in parse_typed_settings(list(settings), schema)):
        if key in PRECISION_WORDS:
            raise BadRecipe(f"{key} as a setting", allowed="--precision P, --bf16 or --fp16", do="write --precision P")
        if key not in HOW:
            allowed = [one for one in HOW if one in build_recipe_fields(schema).by_key]
            raise BadRecipe(
                f"{key} is a setting of the training of {finished.folder}, and cannot change after it",
                allowed=", ".join(allowed) or f"no setting: none of {finished.recipe.task} can change after training",
                do="pass the folder after the run: halfstep predict RUN FOLDER"
                if key == "data.path"
                else f"remove it, or train again with {key} changed",
            )
    recipe = resolve_run_recipe(read_recipe(str(find_recipe_file(finished.folder))), settings, schema=schema).recipe
    # A new run splits its data otherwise than one of an earlier version.
    data = recipe.data.model_copy(update={"split": finished.recipe.data.split})
    recipe = recipe.model_copy(update={"data": data})
    task = restore_task_facts(type(finished.task)(recipe), finished.folder)
    return replace(finished, recipe=recipe, task=task)


PICTURE = "samples.png"
LEAST = 64
"""The height in pixels small pictures are enlarged to."""
COLUMNS = 10
WIDEST = 2400
"""Wider grids get fewer columns, unless the user gave them."""


@dataclass(frozen=True)
class DrawnSamples(PageResult):
    """A picture of samples that a model made."""

    out: Path
    picture: Path
    samples: int
    columns: int
    seed: int
    precision: str
    device: str

    def page(self) -> Page:
        """Return a line about the picture."""
        where = f" in {self.precision} on {escape_to_one_line(self.device)}, seed {self.seed}: "
        line = (
            Span(f"{self.samples} samples", strong=True),
            where,
            Span(escape_to_one_line(self.picture), strong=True),
        )
        return Page("samples", (Paragraph(line, wrap=False),))


def draw_samples(finished: FinishedRun, out: Path, *, samples: int, columns: int | None, seed: int) -> DrawnSamples:
    """Draw samples with a seed, write them as one picture, and return the report.

    Raise `BadData` if there is nothing to draw from, `WrongUse` for a task that draws nothing.
    """
    from halfstep.draw.images import enlarge_picture, join_picture_grid, write_png

    made = [enlarge_picture(picture, LEAST) for picture in _generate_samples(finished, samples, seed)]
    if not made:
        raise BadData(
            f"{finished.folder}: it has no validation data that can be read",
            allowed="the run's validation data",
            do=f"check data.path in its recipe, or give images: halfstep predict {finished.folder} FOLDER",
        )
    columns = columns or _choose_columns(made, len(finished.task.facts().get("classes") or ()))
    with replace_write_errors(out):
        write_png(out / PICTURE, join_picture_grid([made[i : i + columns] for i in range(0, len(made), columns)]))
    choice = finished.choice
    return DrawnSamples(out, out / PICTURE, len(made), columns, seed, choice.precision.name, choice.device.name)


def _generate_samples(finished: FinishedRun, samples: int, seed: int) -> list[Picture]:
    from halfstep.train.environment import seed_all
    from halfstep.train.process_group import preserve_rng
    from halfstep.train.task import MissingTaskMethod

    inference = finished.choice.precision.inference(finished.device)
    try:
        with display_progress("sampling", "steps") as on_progress, preserve_rng(), inference:
            # Seeded inside `preserve_rng`, which restores the caller's generators afterwards.
            seed_all(seed)
            return finished.task.sample(finished.model, samples, on_progress)
    except MissingTaskMethod:
        raise WrongUse(
            f"the model of {finished.folder} generates nothing by itself",
            allowed="a folder of images",
            do=f"halfstep predict {finished.folder} FOLDER",
        ) from None


def _choose_columns(pictures: list[Picture], classes: int) -> int:
    """Return ten columns where they fit; for classes in turn, a multiple of the classes, so that a column has one
    class.
    """
    widest: int = max(picture.shape[1] for picture in pictures)
    most = min(COLUMNS, max(1, WIDEST // widest))
    return most - most % classes if 0 < classes <= most else most


TABLE = "predictions.csv"
MILLISECONDS = 150
"""The duration of a frame in an animation."""


@dataclass(frozen=True)
class FolderInputs:
    """The inputs in a folder by name, not yet read."""

    unit: str
    names: list[str]
    read: Callable[[int], Tensor]
    kinds: str
    """The readable kinds, in words."""


@dataclass(frozen=True)
class Predictions(PageResult, JsonResult):
    """The predictions of a folder's images or clips."""

    out: Path
    unit: str
    """images or clips."""
    count: int
    unreadable: list[LeftOutFile]
    precision: str
    device: str
    pictures: list[str]
    """The kinds of pictures that were written."""
    table: Path

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; the count is called by its unit."""
        return {self.unit if key == "count" else key: one for key, one in super().as_dict().items() if key != "unit"}

    def page(self) -> Page:
        """Return the unreadable samples, and the place of the predictions."""
        left_out = (build_left_out_line(one) for one in self.unreadable)
        many = f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"
        count = (Span(many, strong=True), f" in {self.precision} on {escape_to_one_line(self.device)}")
        pictures = ", ".join(f"{kind}s" for kind in self.pictures)
        place = (
            f"{pictures} and a table in " if pictures else "a table in ",
            Span(escape_to_one_line(self.out), strong=True),
        )
        # Not wrapped: a path is selected with the mouse.
        return Page("predictions", (*left_out, Paragraph(count), Paragraph(place, indent=True, wrap=False)))


def predict_inputs(finished: FinishedRun, where: Path, out: Path) -> Predictions:
    """Predict each image or clip, write the results, and return the report.

    Unreadable inputs are reported; raise `BadData` if none can be read.
    """
    from halfstep.data.dataset import BadSample

    inputs = _find_inputs(finished, where)
    do = f"halfstep predict {finished.folder}, or write a predict for {type(finished.task).__name__}"
    rows: list[dict[str, object]] = []
    bad: list[LeftOutFile] = []
    with display_progress("predicting", inputs.unit) as on_progress:
        for number, name in enumerate(inputs.names):
            try:
                prediction = finished.predict_tensor(inputs.read(number), allowed="no folder", do=do)
            except BadSample as error:
                bad.append(LeftOutFile(name, error.reason))
            else:
                with replace_write_errors(out):
                    rows.append({"file": name, **_write_prediction(prediction, out, Path(name))})
            on_progress(number + 1, len(inputs.names))
    if not rows:
        raise BadData(
            f"none of the {inputs.unit} below {where} could be read ({len(bad)} tried)",
            allowed=inputs.kinds,
            do=f"look at {bad[0].file}: {bad[0].reason}" if bad else f"give a folder with {inputs.unit}",
        )
    with replace_write_errors(out):
        write_csv(out / TABLE, rows)
    kinds = [kind for kind in ("mask", "overlay", "animation") if any(kind in row for row in rows)]
    choice = finished.choice
    return Predictions(out, inputs.unit, len(rows), bad, choice.precision.name, choice.device.name, kinds, out / TABLE)


def _find_inputs(finished: FinishedRun, where: Path) -> FolderInputs:
    """Return clips for a task whose data has frames, images otherwise; a single image file is always an image."""
    from halfstep.data.image_files import SUFFIXES, list_image_files
    from halfstep.data.image_io import read_image

    if not where.is_dir() and not where.is_file():
        raise BadData(
            f"{where} {'is neither a folder nor a file' if where.exists() else 'does not exist'}",
            allowed="a folder, or one file",
            do=f"give an existing one: halfstep predict {finished.folder} FOLDER",
        )
    data = finished.recipe.data
    if {"frames", "every"} <= set(type(data).model_fields) and where.suffix.lower() not in SUFFIXES:
        return _find_clips(data, where)
    root, names = (where.parent, [where.name]) if where.is_file() else (where, list_image_files(where))
    kinds = "JPEG, PNG, TIFF, WEBP or BMP images"
    return FolderInputs("images", names, lambda number: read_image(root / names[number], finished.channels()), kinds)


def _find_clips(data: Any, place: Path) -> FolderInputs:
    """Return consecutive clips of data.frames frames."""
    from halfstep.tasks.shared.sources import CLIPS, open_clips

    found = open_clips(place, data)
    keys = [found.key(number).rpartition("#") for number in range(len(found))]
    # A folder that is itself a clip has an empty relative name.
    own = place.resolve().name
    parts = [(own if whole in ("", ".") else whole, int(first)) for whole, _, first in keys]
    return FolderInputs("clips", _name_clips(parts), lambda number: found.read(number)["image"], CLIPS)


def _name_clips(parts: list[tuple[str, int]]) -> list[str]:
    """Return names with the number of the first frame; without it where a recording has one clip and the name is
    free.
    """
    times = Counter(whole for whole, _ in parts)
    numbered = [f"{whole}-{first:05d}" for whole, first in parts]
    taken = {name for name, (whole, _) in zip(numbered, parts, strict=True) if times[whole] > 1}
    return [
        whole if times[whole] == 1 and whole not in taken else name
        for name, (whole, _) in zip(numbered, parts, strict=True)
    ]


def _write_prediction(prediction: Prediction, out: Path, name: Path) -> dict[str, object]:
    """Write pictures into a folder per kind, named after the image, and return the row of the table."""
    from halfstep.draw.images import write_gif, write_png

    row = dict(prediction.values)
    for kind, picture in (("mask", prediction.mask), ("overlay", _add_legend(prediction, name))):
        if picture is not None:
            # Append to the full name, since a.jpg and a.tif may be in one folder.
            file = out / f"{kind}s" / (name if name.suffix == ".png" else name.with_name(f"{name.name}.png"))
            write_png(file, picture)
            row[kind] = str(file.relative_to(out))
    if prediction.frames:
        file = out / "overlays" / name.with_name(f"{name.name}.gif")
        write_gif(file, prediction.frames, MILLISECONDS)
        row["animation"] = str(file.relative_to(out))
    return row


def _add_legend(prediction: Prediction, name: Path) -> Picture | None:
    """Return the overlay with a legend of its colors; unchanged if there is none."""
    from halfstep.draw.sheet import PicturedSample, draw_single_picture

    if prediction.overlay is None or not prediction.legend:
        return prediction.overlay
    return draw_single_picture(PicturedSample({"": prediction.overlay}, str(name)), prediction.legend)
