"""`halfstep.evaluate`: measure a run's weights on its validation data or on another folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import WrongUse, choose_caller_wording, format_option, format_option_with_value
from halfstep.files import check_file_free, replace_storage_errors
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.runs.evaluate import EvaluationResult
    from halfstep.runs.evaluate_page import Evaluation
    from halfstep.runs.finished import FinishedRun
    from halfstep.train.task import Task


def evaluate(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    weights: str = "best",
    precision: str | None = None,
    csv: str | os.PathLike[str] | None = None,
    picture: str | os.PathLike[str] | None = None,
    samples: int = 8,
    overwrite: bool = False,
    task: type[Task] | str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Measure a run's weights: overall, per class and per sample, with the worst samples.

    Args:
        run: The folder of a run.
        data: A folder of labeled data, laid out like the training data; by default the run's validation data.
        weights: `best`, `last`, or a .safetensors file.
        precision: The precision. Default: the run's.
        csv: A file for a row per sample; classes and confusion are written next to it.
        picture: A .png file for the confusion, the classes, and the worst and typical samples.
        samples: Samples in the picture.
        overwrite: Replace files that exist.
        task: The class of a task of your own, or its file.

    Returns:
        The metrics, the figures of classes and samples, and the files that were written.

    Raises:
        BadData: The folder holds no run, its weights are missing or not finite, or the data have another layout.
        FolderTaken: A file exists already.
        StorageFailed: A file cannot be written.
        WrongUse: The task has no figures of samples, or is evaluated on its own data alone.
    """
    folder = Path(os.path.expanduser(run))
    table, image = (None if file is None else Path(os.path.expanduser(file)) for file in (csv, picture))
    tables: tuple[Path, ...] = ()
    if table is not None:
        tables = (table, *(table.with_name(f"{table.stem}_{kind}{table.suffix}") for kind in ("classes", "confusion")))
    # Before the evaluation, which may take minutes.
    _check_files(tables, image, overwrite)
    from halfstep.train.run_folder import find_recipe_file

    find_recipe_file(folder)  # fails before torch is loaded, which takes seconds
    from halfstep.random_state import preserve_random_state
    from halfstep.runs.evaluate import measure_weights
    from halfstep.runs.finished import open_finished, replace_validation_data
    from halfstep.runs.registry import resolve_own_task

    own = None if task is None else resolve_own_task(task)
    finished = open_finished(folder, weights=str(weights), precision=precision, own=own)
    if data is not None:
        finished = replace_validation_data(finished, Path(os.path.expanduser(data)))
    with preserve_random_state(finished.device):
        with display_progress("evaluating", "batches") as on_progress:
            found = measure_weights(finished, "validation" if data is None else str(data), on_progress)
        if not tables and image is None:
            return found.report
        return replace(found.report, written=_write_files(found, finished, tables, image, samples))


def _check_files(tables: Sequence[Path], picture: Path | None, overwrite: bool) -> None:
    """Raise `WrongUse` or `FolderTaken` for unusable output files before the first operation."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise WrongUse(
            format_option_with_value("picture", picture),
            allowed="a name that ends in .png",
            do=format_option_with_value("picture", picture.with_suffix(".png")),
        )
    for file in (*tables, *([picture] if picture else [])):
        check_file_free(file, overwrite, do="give another name", flag=format_option("overwrite"))


def _write_files(
    found: EvaluationResult, finished: FinishedRun, tables: Sequence[Path], picture: Path | None, samples: int
) -> tuple[Path, ...]:
    """Write the requested files and return their paths. Raise `WrongUse` for a task without per-sample figures."""
    from halfstep.runs.evaluate import draw_samples, write_tables

    figures = found.report.figures
    if figures is None:
        given = choose_caller_wording("--csv", "csv=") if tables else choose_caller_wording("--picture", "picture=")
        raise WrongUse(
            f"{given} for the task {finished.recipe.task}, which has no figures of samples",
            allowed="runs of segmentation and classification",
            do=choose_caller_wording("leave it out, or write --json", "leave it out"),
        )
    with replace_storage_errors(
        "the requested output cannot be written",
        allowed="a place that this user can write to, with room for it",
        do=f"give another name to {choose_caller_wording('--csv or --picture', 'csv or picture')}",
    ):
        if tables:
            write_tables(figures, tables)
        if picture is not None:
            draw_samples(found, figures, finished, picture, samples)
    return (*tables, *([picture] if picture else []))
