"""`halfstep evaluate`: measure a run's weights on its validation data or on a test set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import Bf16, Fp16, Json, OwnTask, Precision, RunFolder, Weights, flag, opened, print_json

GROUP = "Run"


def run(
    folder: RunFolder,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="Labelled data elsewhere, laid out as the training data were; the run's validation data if left out.",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write a row for each sample here; classes and confusion beside it.", metavar="FILE"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw confusion, classes, the worst and typical samples.", metavar="FILE.png")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=100, help="Samples in the picture.")] = 8,
    overwrite: Annotated[bool, flag("--overwrite", "Replace files that are there.")] = False,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Measure a run's weights: overall, per class and per sample, and name the worst samples."""
    from halfstep.cli.pages.evaluate import check_files, measured, show, write_files

    # Before the evaluation, which may take minutes.
    check_files(csv, picture, overwrite)
    finished = opened(folder, weights, precision, bf16, fp16, task)
    if data is not None:
        from halfstep.runs.finished import elsewhere

        finished = elsewhere(finished, data)
    found = measured(finished, "validation" if data is None else str(data))
    written = write_files(found, finished, csv, picture, samples)
    if json:
        print_json({**found.report.as_dict(), "written": written})
    else:
        show(found.report, written)
