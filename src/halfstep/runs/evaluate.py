"""Measure a run's weights overall, per class and per sample; write the tables and the picture of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.data.dataset import Batch, ReplacedSample
from halfstep.data.loader import ValLoader
from halfstep.draw import confusion as confusion_picture
from halfstep.draw.images import write_png
from halfstep.draw.sheet import PicturedSample, draw_sample_sheet, join_row_or_column
from halfstep.files import write_csv
from halfstep.json_data import convert_to_json_data
from halfstep.metric_names import format_metric_name
from halfstep.runs.evaluate_page import ClassFigures, Columns, Evaluation, Mistake, format_figure
from halfstep.runs.finished import FinishedRun
from halfstep.runs.left_out import LeftOutFile
from halfstep.status_line import OnProgress
from halfstep.tasks.shared.confusion import Confusion
from halfstep.train.evaluation import (
    SampleChooser,
    describe_chosen_samples,
    evaluate_model,
    format_caption,
    format_caption_start,
)
from halfstep.train.loaders import make_val_loader
from halfstep.train.task import MissingTaskMethod, Task

WORST = 5
"""How many samples are listed as the worst."""
MISTAKES = 10
"""How many pairs of classes are listed as the most confused."""


@dataclass
class SampleScores:
    """Receives the same outputs as the metrics and stores them per sample."""

    task: Task
    choosing: SampleChooser
    rows: list[tuple[int, float, Columns]] = field(default_factory=list)
    """For each sample its number, its quality and its figures."""
    counts: Any = None

    def add(self, batch: Batch, output: Any, truth: Any) -> None:
        """Add the outputs of a batch."""
        judged = self.task.judge(output, truth)
        self.choosing.add(batch, judged)
        counts = judged.counts.cpu()
        self.counts = counts if self.counts is None else self.counts + counts
        names = list_class_names(self.task, len(counts))
        columns: dict[str, list[Any]] = {}
        columns |= {key: [names[number] for number in tensor.tolist()] for key, tensor in judged.classes.items()}
        columns |= {
            key: list(map(_replace_nonfinite_number, tensor.tolist())) for key, tensor in judged.figures.items()
        }
        values = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        self.rows += zip(batch.ids, judged.quality.tolist(), values, strict=True)


@dataclass
class EvaluationResult:
    """An evaluation, and the objects that pictures are drawn from."""

    report: Evaluation
    loader: ValLoader
    choosing: SampleChooser


def measure_weights(finished: FinishedRun, data: str, on_progress: OnProgress) -> EvaluationResult:
    """Evaluate the data in one pass; per-sample figures come from the outputs the metrics received."""
    loader = make_val_loader(finished.task, finished.recipe, finished.device)
    listener = SampleScores(finished.task, SampleChooser(finished.task))
    left_out: list[ReplacedSample] = []
    metrics = evaluate_model(
        finished.task,
        finished.model,
        loader,
        precision=finished.choice.precision,
        device=finished.device,
        progress=on_progress,
        left_out=left_out.extend,
        on_outputs=listener.add if listener.choosing.judges else None,
    )
    counts = listener.counts
    confusion = Confusion(list_class_names(finished.task, len(counts)), counts) if counts is not None else None
    report = Evaluation(
        run=finished.folder,
        weights=finished.weights,
        precision=finished.choice.precision.name,
        device=finished.choice.device.name,
        data=data,
        samples=len(loader.samples) - len(left_out),
        left_out=[LeftOutFile(one.name, one.reason) for one in left_out],
        metric=finished.task.metric,
        metrics={name: _replace_nonfinite_number(value) for name, value in metrics.items()},
        figures=_build_class_figures(confusion, listener, loader) if confusion else None,
        findings=finished.choice.findings,
    )
    return EvaluationResult(report, loader, listener.choosing)


def _build_class_figures(confusion: Confusion, listener: SampleScores, loader: ValLoader) -> ClassFigures:
    name = loader.samples.source.name
    rows = sorted(listener.rows, key=lambda row: row[0])
    worst = sorted(rows, key=lambda row: row[1])[:WORST]
    return ClassFigures(
        counted=_name_counted_unit(listener.task),
        classes=confusion.per_class(),
        confusion=confusion,
        mistakes=[Mistake(*one) for one in confusion.mistakes(MISTAKES)],
        worst=[{"file": name(number), **row} for number, _, row in worst],
        each=[{"file": name(number), **row} for number, _, row in rows],
    )


def _name_counted_unit(task: Task) -> str:
    try:
        return "pixels" if task.signature().answer == "mask" else "images"
    except MissingTaskMethod:
        return "answers"


def list_class_names(task: Task, many: int) -> list[str]:
    """Return the class names; numbers if a task has no signature."""
    try:
        return task.signature().classes
    except MissingTaskMethod:
        return [str(number) for number in range(many)]


def _replace_nonfinite_number(value: Any) -> Any:
    """Return None for a number that is not finite, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_tables(figures: ClassFigures, files: Sequence[Path]) -> None:
    """Write the CSV files of samples, classes and the confusion matrix."""
    names, counts = figures.confusion.names, figures.confusion.counts.tolist()
    matrix = [{"truth": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, counts, strict=True)]
    for file, rows in zip(files, (figures.each, convert_to_json_data(figures.classes), matrix), strict=True):
        write_csv(file, rows)


def draw_samples(
    found: EvaluationResult, figures: ClassFigures, finished: FinishedRun, file: Path, samples: int
) -> None:
    """Draw confusion, classes, and the worst and typical samples into a PNG."""
    chosen = found.choosing.chosen(samples)
    batch = found.loader.read([one.number for one in chosen])
    with finished.choice.precision.inference(finished.device):
        shown = finished.task.shown(finished.model, batch.tensors)
    why, source = {one.number: one.why for one in chosen}, found.loader.samples.source
    entries = [
        PicturedSample(
            one.panels, format_caption(format_caption_start(why[number], source.name(number)), one), one.frame
        )
        for number, one in zip(batch.ids, shown, strict=True)
    ]
    report = found.report
    value = format_figure(report.metrics[report.metric])
    heading = f"{finished.folder.name} on {report.data}, {format_metric_name(report.metric)} {value}"
    picture = draw_sample_sheet(
        entries,
        heading,
        describe_chosen_samples(chosen, found.choosing.total),
        finished.task.legend(),
        _draw_figures(figures),
    )
    write_png(file, picture)


def _draw_figures(found: ClassFigures) -> list[Any]:
    """Return the confusion matrix and the bars, side by side where both fit."""
    names = found.confusion.names
    # For single-label classes, Dice and F1 are the same number.
    key, heading = ("iou", "IoU of each class") if found.counted == "pixels" else ("dice", "F1 of each class")
    few = len(names) <= confusion_picture.MOST_SHOWN
    figures = [confusion_picture.draw_confusion_matrix(names, found.confusion.shares())] if few else []
    values = [math.nan if (value := getattr(row, key)) is None else value for row in found.classes]
    figures.append(confusion_picture.draw_class_bars(names, values, heading))
    return [join_row_or_column(figures)]
