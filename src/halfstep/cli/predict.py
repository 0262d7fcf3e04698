"""`halfstep predict`: what a run's model says about images in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._opened import Bf16, Fp16, OwnTask, Precision, RunFolder, Weights, opened
from halfstep.errors import BadData

if TYPE_CHECKING:
    from halfstep.tasks._finished import Finished
    from halfstep.train.task import Prediction

GROUP = "Run"
TABLE = "predictions.csv"


def run(
    folder: RunFolder,
    images: Annotated[Path, typer.Argument(metavar="FOLDER", help="Images, in any folders below it; or one image.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN/predictions if left out.")] = None,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Predict masks or classes for images. Writes pictures where the task draws, and a table of values."""
    finished = opened(folder, weights, precision, bf16, fp16, task)
    report = predict(finished, images, out or folder / "predictions")
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    else:
        _print(report)


def predict(finished: Finished, images: Path, out: Path) -> dict[str, Any]:
    """Predict each image, write what comes of it, and say where."""
    from halfstep.cli._progress import progress
    from halfstep.train.data.listing import existing, image_files
    from halfstep.train.data.source import BadSample

    root, names = (images.parent, [images.name]) if images.is_file() else (images, image_files(existing(images, "")))
    rows, bad = [], []
    with progress("predicting", "images") as told:
        for done, name in enumerate(names, 1):
            try:
                rows.append({"file": name, **_write(_predicted(finished, root / name), out, Path(name))})
            except BadSample as error:
                bad.append({"file": name, "reason": error.reason})
            told(done, len(names))
    if not rows:
        raise BadData(
            f"no image below {images} could be read ({len(bad)} tried)",
            allowed="JPEG, PNG, TIFF, WEBP or BMP images",
            do=f"look at {bad[0]['file']}: {bad[0]['reason']}" if bad else "give a folder with images",
        )
    _write_table(rows, out / TABLE)
    kinds = sorted({kind for row in rows for kind in ("mask", "overlay") if kind in row})
    return {
        "out": str(out),
        "images": len(rows),
        "unreadable": bad,
        "precision": finished.choice.precision.name,
        "device": finished.choice.device.name,
        "pictures": kinds,
        "table": str(out / TABLE),
    }


def _predicted(finished: Finished, file: Path) -> Prediction:
    from halfstep.train.data.reading import read_image

    image = read_image(file, getattr(finished.recipe.data, "channels", 3)).to(finished.device)
    with finished.choice.precision.inference(finished.device):
        return finished.task.predict(finished.model, image)


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


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for bad in report["unreadable"]:
        console.print(f"[yellow]left out[/] {bad['file']}: {bad['reason']}", soft_wrap=True)
    what = " and ".join([f"{kind}s" for kind in report["pictures"]] + ["a table"])
    console.print(
        f"[bold]{report['images']} images[/] in {report['precision']} on {report['device']}: "
        f"{what} in [bold]{report['out']}[/]",
        soft_wrap=True,
    )
