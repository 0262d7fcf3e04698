"""`halfstep predict`: predict the images of a folder with a run's model, or draw samples from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import Bf16, Fp16, Json, OwnTask, Precision, RunFolder, Weights, flag, opened, show_result

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
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Without FOLDER: the seed of the samples.")] = 0,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Predict masks or classes for images, or objects in clips; without FOLDER, draw samples from the model alone.

    Writes pictures if the task draws them, and a table of values; or one picture of all samples. Settings after FOLDER
    change inference only, not the trained weights: model.guidance=4, or --sample_steps 100.
    """
    from halfstep.cli._predict_outputs import (
        DrawnSamples,
        Predictions,
        changed,
        check_place,
        drawn,
        folder_and_settings,
        predict,
    )  # fmt: skip
    from halfstep.train.run_folder import recipe_in

    recipe_in(folder)  # first: a file in the place of RUN is no folder for predictions
    images, settings = folder_and_settings(rest or [])
    place = out or folder / "predictions"
    check_place(place, overwrite)
    finished = changed(opened(folder, weights, precision, bf16, fp16, task), settings)
    if images is None:
        report: DrawnSamples | Predictions = drawn(finished, place, samples=samples, columns=columns, seed=seed)
    else:
        report = predict(finished, images, place)
    show_result(report, report.page(), json)
