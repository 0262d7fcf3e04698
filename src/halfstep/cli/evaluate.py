"""`halfstep evaluate`: measure a run's weights on its validation data or on a test set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import (
    Bf16,
    Fp16,
    Json,
    OwnTask,
    Precision,
    RunFolder,
    Weights,
    create_flag_option,
    resolve_precision_options,
    show_result,
)  # fmt: skip
from halfstep.page import Paragraph, Span
from halfstep.terminal import create_console

GROUP = "Run"


def run(
    folder: RunFolder,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="Other labeled data, laid out like the training data. Default: the run's validation data.",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write a row for each sample here; classes and confusion next to it.", metavar="FILE"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw confusion, classes, the worst and typical samples.", metavar="FILE.png")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=100, help="Samples in the picture.")] = 8,
    overwrite: Annotated[bool, create_flag_option("--overwrite", "Replace existing files.")] = False,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Evaluate a run's weights overall, per class and per sample, and list the worst samples."""
    named = resolve_precision_options(precision, bf16, fp16)
    from halfstep.runs.evaluate_run import evaluate

    report = evaluate(
        folder,
        data,
        weights=weights,
        precision=named,
        csv=csv,
        picture=picture,
        samples=samples,
        overwrite=overwrite,
        task=task,
    )
    for finding in report.findings:
        create_console(stderr=True, soft_wrap=True).print(str(finding))
    page = report.page()
    if report.figures is not None and not report.written:
        words = "--csv FILE writes a row per sample; --picture FILE.png draws the worst samples"
        page = page.followed_by(Paragraph(Span(words, "dim"), gap=True, wrap=False))
    show_result(report, page, json)
