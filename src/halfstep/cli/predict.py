"""`halfstep predict`: predict the images of a folder with a run's model, or draw samples from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from halfstep.cli._options import Bf16, Fp16, Json, OwnTask, Precision, RunFolder, Weights, flag, opened, print_report
from halfstep.printable import in_line
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.cli._predict_outputs import DrawnSamples, Predictions

GROUP = "Run"
COMMAND = {"context_settings": {"ignore_unknown_options": True}}


def run(
    folder: RunFolder,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [KEY=VALUE]...",
            help="Images or clips, in any folders below FOLDER, or one file; then settings of how it is done.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN/predictions if left out.")] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace predictions that are there.")] = False,
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Without FOLDER: how many pictures are made.")] = 40,
    columns: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Without FOLDER: pictures in a row; 10 where they fit.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Without FOLDER: decides what is drawn.")] = 0,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Predict masks or classes for images, or objects in clips; without FOLDER, draw samples from the model alone.

    Writes pictures where the task draws them, and a table of values; or one picture of all samples. Settings after
    FOLDER change inference only, not what was learned: model.guidance=4, or --sample_steps 100.
    """
    from halfstep.cli._predict_outputs import changed, check_place, drawn, folder_and_settings, predict
    from halfstep.train.run_folder import recipe_in

    recipe_in(folder)  # first: a file in the place of RUN is no folder for predictions
    images, settings = folder_and_settings(rest or [])
    place = out or folder / "predictions"
    check_place(place, overwrite)
    finished = changed(opened(folder, weights, precision, bf16, fp16, task), settings)
    if images is None:
        print_report(drawn(finished, place, samples=samples, columns=columns, seed=seed), json, _print_drawn)
    else:
        print_report(predict(finished, images, place), json, _print_predictions)


def _print_drawn(report: DrawnSamples) -> None:
    where = f" in {report.precision} on {in_line(report.device)}, seed {report.seed}: "
    picture = (in_line(report.picture), "bold")
    screen().print(Text.assemble((f"{report.samples} samples", "bold"), where, picture), soft_wrap=True)


def _print_predictions(report: Predictions) -> None:
    console = screen()
    for bad in report.unreadable:
        console.print(Text.assemble(("left out", "yellow"), in_line(f" {bad.file}: {bad.reason}")), soft_wrap=True)
    pictures = ", ".join(f"{kind}s" for kind in report.pictures)
    what = f"{pictures} and a table" if pictures else "a table"
    many = f"{report.count} {report.unit if report.count != 1 else report.unit[:-1]}"
    console.print(Text.assemble((many, "bold"), f" in {report.precision} on {in_line(report.device)}"))
    # Not wrapped: a path is selected with the mouse.
    console.print(Text.assemble(f"  {what} in ", (in_line(report.out), "bold")), soft_wrap=True)
