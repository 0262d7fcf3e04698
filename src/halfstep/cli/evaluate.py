"""`halfstep evaluate`: measure a run's weights on its validation data or on a test set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._options import (
    Bf16,
    Fp16,
    Json,
    OwnTask,
    Precision,
    RunFolder,
    Weights,
    flag,
    opened,
    refuse_taken,
    show_result,
    storing,
)  # fmt: skip
from halfstep.errors import WrongUse
from halfstep.page import Paragraph, Span
from halfstep.printable import in_line
from halfstep.terminal import progress

if TYPE_CHECKING:
    from halfstep.runs.evaluate import Evaluated
    from halfstep.runs.finished import Finished

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
    # Before the evaluation, which may take minutes.
    _check_files(csv, picture, overwrite)
    finished = opened(folder, weights, precision, bf16, fp16, task)
    from halfstep.runs.evaluate import measure_weights
    from halfstep.runs.finished import elsewhere

    if data is not None:
        finished = elsewhere(finished, data)
    with progress("evaluating", "batches") as on_progress:
        found = measure_weights(finished, "validation" if data is None else str(data), on_progress)
    report = found.report
    written = _write_files(found, finished, csv, picture, samples) if csv or picture else []
    more = [Paragraph(("written: ", Span(in_line(file), strong=True)), wrap=False) for file in written]
    if report.figures is not None and not written:
        words = "--csv FILE writes a row for each sample, --picture FILE.png draws the worst"
        more = [Paragraph(Span(words, "dim"), gap=True, wrap=False)]
    show_result({**report.as_dict(), "written": written}, report.page().followed_by(*more), json)


def _table_files(table: Path | None) -> list[Path]:
    """Return the CSV files of samples, classes and the confusion matrix."""
    if table is None:
        return []
    return [table, *(table.with_name(f"{table.stem}_{kind}{table.suffix}") for kind in ("classes", "confusion"))]


def _check_files(table: Path | None, picture: Path | None, overwrite: bool) -> None:
    """Raise `WrongUse` or `FolderTaken` for unusable output files before anything is computed."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise WrongUse(
            f"--picture {picture}", allowed="a name that ends in .png", do=f"--picture {picture.with_suffix('.png')}"
        )
    for file in [*_table_files(table), *([picture] if picture else [])]:
        refuse_taken(file, overwrite, do="give another name", flag="--overwrite")


def _write_files(
    found: Evaluated, finished: Finished, table: Path | None, picture: Path | None, samples: int
) -> list[Path]:
    """Write the requested files and return their paths. Raise `WrongUse` for a task without per-sample figures."""
    from halfstep.runs.evaluate import draw_samples, write_tables

    figures = found.report.figures
    if figures is None:
        raise WrongUse(
            f"{'--csv' if table else '--picture'} for the task {finished.recipe.task}, which has no figures of samples",
            allowed="runs of segmentation and classification",
            do="leave it out, or write --json",
        )
    with storing(
        "what was asked for cannot be written",
        allowed="a place that this user can write to, with room for it",
        do="give another name to --csv or --picture",
    ):
        if table is not None:
            write_tables(figures, _table_files(table))
        if picture is not None:
            draw_samples(found, figures, finished, picture, samples)
    return [*_table_files(table), *([picture] if picture else [])]
