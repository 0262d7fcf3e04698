"""Measure a run's weights overall, per class and per sample; write and print the results."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli._options import refuse_taken, storing, write_csv
from halfstep.cli._predict_outputs import LeftOutFile
from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.json_data import JsonResult, json_data
from halfstep.printable import in_line, shortened
from halfstep.terminal import progress, screen

if TYPE_CHECKING:
    from halfstep.data.dataset import Batch
    from halfstep.data.loader import ValLoader
    from halfstep.runs.finished import Finished
    from halfstep.tasks.shared.confusion import ClassScores, Confusion
    from halfstep.train.evaluation import Choosing
    from halfstep.train.task import Task

Columns = dict[str, object]
"""A row of a table whose columns a task names."""

WORST = 5
"""How many samples are listed as the worst."""
MISTAKES = 10
"""How many pairs of classes are listed as the most confused."""


@dataclass
class SampleScores:
    """Receives the same outputs as the metrics and stores them per sample."""

    task: Task
    choosing: Choosing
    rows: list[tuple[int, float, Columns]] = field(default_factory=list)
    """For each sample its number, its quality and its figures."""
    counts: Any = None

    def add(self, batch: Batch, output: Any, truth: Any) -> None:
        """Add the outputs of a batch."""
        judged = self.task.judge(output, truth)
        self.choosing.add(batch, judged)
        counts = judged.counts.cpu()
        self.counts = counts if self.counts is None else self.counts + counts
        names = classes_of(self.task, len(counts))
        columns: dict[str, list[Any]] = {}
        columns |= {key: [names[number] for number in tensor.tolist()] for key, tensor in judged.classes.items()}
        columns |= {key: tensor.tolist() for key, tensor in judged.figures.items()}
        values = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        self.rows += zip(batch.ids, judged.quality.tolist(), values, strict=True)


@dataclass(frozen=True)
class Mistake:
    """Two classes that were confused."""

    truth: str
    answer: str
    count: int
    share: float
    """Share of the true class."""


@dataclass(frozen=True)
class ClassFigures:
    """Figures of classes and samples; a number that is undefined is None."""

    counted: str
    """The unit of the confusion matrix: pixels, images or answers."""
    classes: list[ClassScores]
    confusion: Confusion
    mistakes: list[Mistake]
    """The most frequent confusions."""
    worst: list[Columns]
    each: list[Columns]
    """For each sample its file and its figures."""


@dataclass(frozen=True)
class Evaluation(JsonResult):
    """The figures of a run's weights."""

    run: Path
    weights: Path
    precision: str
    device: str
    data: str
    """validation, or a folder."""
    samples: int
    left_out: list[LeftOutFile]
    metric: str
    """The metric that decides."""
    metrics: dict[str, float | None]
    figures: ClassFigures | None
    """None for a task without classes."""
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the figures among the others."""
        found = super().as_dict()
        figures, findings = found.pop("figures"), found.pop("findings")
        return {**found, **(figures or {}), "findings": findings}


@dataclass
class Evaluated:
    """An evaluation, and the objects that pictures are drawn from."""

    report: Evaluation
    loader: ValLoader
    choosing: Choosing


def measured(finished: Finished, data: str) -> Evaluated:
    """Evaluate the data in one pass; per-sample figures come from the outputs the metrics received."""
    from halfstep.tasks.shared.confusion import Confusion
    from halfstep.train.evaluation import Choosing
    from halfstep.train.loaders import make_val_loader

    loader = make_val_loader(finished.task, finished.recipe, finished.device)
    listener = SampleScores(finished.task, Choosing(finished.task))
    metrics, left_out = _evaluated(finished, loader, listener)
    counts = listener.counts
    confusion = Confusion(classes_of(finished.task, len(counts)), counts) if counts is not None else None
    report = Evaluation(
        run=finished.folder,
        weights=finished.weights,
        precision=finished.choice.precision.name,
        device=finished.choice.device.name,
        data=data,
        samples=len(loader.samples) - len(left_out),
        left_out=[LeftOutFile(one.name, one.reason) for one in left_out],
        metric=finished.task.metric,
        metrics=plain(metrics),
        figures=_figures(confusion, listener, loader) if confusion else None,
        findings=finished.choice.findings,
    )
    return Evaluated(report, loader, listener.choosing)


def _evaluated(finished: Finished, loader: ValLoader, listener: SampleScores) -> tuple[dict[str, float], list[Any]]:
    """Return the metrics, and the samples that were left out."""
    from halfstep.train.evaluation import evaluate

    left_out: list[Any] = []
    with progress("evaluating", "batches") as on_progress:
        metrics = evaluate(
            finished.task,
            finished.model,
            loader,
            precision=finished.choice.precision,
            device=finished.device,
            progress=on_progress,
            left_out=left_out.extend,
            on_outputs=listener.add if listener.choosing.judges else None,
        )
    return metrics, left_out


def _figures(confusion: Confusion, listener: SampleScores, loader: ValLoader) -> ClassFigures:
    name = loader.samples.source.name
    rows = sorted(listener.rows, key=lambda row: row[0])
    worst = sorted(rows, key=lambda row: row[1])[:WORST]
    return ClassFigures(
        counted=_counted(listener.task),
        classes=confusion.per_class(),
        confusion=confusion,
        mistakes=[Mistake(*one) for one in confusion.mistakes(MISTAKES)],
        worst=plain([{"file": name(number), **row} for number, _, row in worst]),
        each=plain([{"file": name(number), **row} for number, _, row in rows]),
    )


def _counted(task: Task) -> str:
    from halfstep.train.task import LeftOut

    try:
        return "pixels" if task.signature().answer == "mask" else "images"
    except LeftOut:
        return "answers"


def classes_of(task: Task, many: int) -> list[str]:
    """Return the class names; numbers where a task has no signature."""
    from halfstep.train.task import LeftOut

    try:
        return task.signature().classes
    except LeftOut:
        return [str(number) for number in range(many)]


def plain(value: Any) -> Any:
    """Return the value with null for non-finite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- evaluated files --------------------------------------------------------------------------------------------------
# The files `halfstep evaluate` writes: CSV tables and a picture.


def check_files(table: Path | None, picture: Path | None, overwrite: bool) -> None:
    """Raise `WrongUse` or `FolderTaken` for unusable output files before anything is computed."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise WrongUse(
            f"--picture {picture}", allowed="a name that ends in .png", do=f"--picture {picture.with_suffix('.png')}"
        )
    for file in [*(tables(table) if table else []), *([picture] if picture else [])]:
        refuse_taken(file, overwrite, do="give another name", flag="--overwrite")


def tables(table: Path) -> list[Path]:
    """Return the CSV files of samples, classes and the confusion matrix."""
    return [table, *(table.with_name(f"{table.stem}_{kind}{table.suffix}") for kind in ("classes", "confusion"))]


def write_files(
    found: Evaluated, finished: Finished, table: Path | None, picture: Path | None, samples: int
) -> list[Path]:
    """Write the requested files and return their paths. Raise `WrongUse` for a task without per-sample figures."""
    if (table or picture) and found.report.figures is None:
        raise WrongUse(
            f"{'--csv' if table else '--picture'} for the task {finished.recipe.task}, which has no figures of samples",
            allowed="runs of segmentation and classification",
            do="leave it out, or write --json",
        )
    written: list[Path] = []
    with storing(
        "what was asked for cannot be written",
        allowed="a place that this user can write to, with room for it",
        do="give another name to --csv or --picture",
    ):
        figures = found.report.figures
        if table is not None and figures is not None:
            _write_tables(figures, tables(table))
            written += tables(table)
        if picture is not None and figures is not None:
            _draw(found, figures, finished, picture, samples)
            written.append(picture)
    return written


def _write_tables(figures: ClassFigures, files: Sequence[Path]) -> None:
    names, counts = figures.confusion.names, figures.confusion.counts.tolist()
    matrix = [{"truth": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, counts, strict=True)]
    for file, rows in zip(files, (figures.each, json_data(figures.classes), matrix), strict=True):
        write_csv(rows, file)


# -- the picture ------------------------------------------------------------------------------------------------------


def _draw(found: Evaluated, figures: ClassFigures, finished: Finished, file: Path, samples: int) -> None:
    from halfstep.draw.images import write_png
    from halfstep.draw.sheet import PicturedSample, sheet
    from halfstep.journal.text import named
    from halfstep.train.evaluation import beginning, caption, described_choice

    chosen = found.choosing.chosen(samples)
    batch = found.loader.read([one.number for one in chosen])
    with finished.choice.precision.inference(finished.device):
        shown = finished.task.shown(finished.model, batch.tensors)
    why, source = {one.number: one.why for one in chosen}, found.loader.samples.source
    entries = [
        PicturedSample(one.panels, caption(beginning(why[number], source.name(number)), one), one.frame)
        for number, one in zip(batch.ids, shown, strict=True)
    ]
    report = found.report
    value = report.metrics[report.metric]
    heading = f"{finished.folder.name} on {report.data}, {named(report.metric)} {value:.4f}"
    picture = sheet(
        entries,
        heading,
        described_choice(chosen, found.choosing.total),
        finished.task.legend(),
        _pictured_figures(figures),
    )
    write_png(file, picture)


def _pictured_figures(found: ClassFigures) -> list[Any]:
    """Return the confusion matrix and the bars, side by side where both fit."""
    from halfstep.draw.confusion import MOST_SHOWN, bars, matrix
    from halfstep.draw.sheet import beside_or_below

    names, rows = found.confusion.names, found.confusion.per_class()
    # For single-label classes, Dice and F1 are the same number.
    key, heading = ("iou", "IoU of each class") if found.counted == "pixels" else ("dice", "F1 of each class")
    figures = [matrix(names, found.confusion.shares())] if len(names) <= MOST_SHOWN else []
    figures.append(bars(names, [math.nan if (value := getattr(row, key)) is None else value for row in rows], heading))
    return [beside_or_below(figures)]


# -- evaluated page ---------------------------------------------------------------------------------------------------
# The page `halfstep evaluate` prints: metrics, classes, confusions, and the worst samples.


MOST_CLASSES = 12
"""Rows of the table; the CSV has all classes."""
MOST_COLUMNS = 6
"""The most classes whose matrix fits into 80 columns."""
NAME = 18


def show(report: Evaluation, written: Sequence[Path]) -> None:
    """Print the page."""
    console = screen()
    where = f" in {report.precision} on {in_line(report.device)}"
    _print_line(console, (in_line(report.weights), "bold"), where)
    _metrics(console, report)
    if report.figures is not None:
        _classes(console, report.figures)
        _confusion(console, report.figures)
        _worst(console, report.figures.worst)
    for one in report.left_out:
        _print_line(console, ("left out", "yellow"), in_line(f" {one.file}: {one.reason}"))
    for file in written:
        _print_line(console, "written: ", (in_line(file), "bold"))
    if report.figures is not None and not written:
        _print_line(console, ("\n--csv FILE writes a row for each sample, --picture FILE.png draws the worst", "dim"))


def _print_line(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one line from words and (words, style) pairs."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def _short(name: str) -> str:
    return shortened(in_line(name), NAME)


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def _metrics(console: Console, report: Evaluation) -> None:
    # Metrics of single classes are in their own table.
    classes = report.figures.classes if report.figures else []
    own = {f"{kind}_{row.name}" for row in classes for kind in ("iou", "dice")}
    shown = {name: value for name, value in report.metrics.items() if name not in own}
    width = max(map(len, shown))
    for name, value in shown.items():
        mark = "  the metric that decides" if name == report.metric else ""
        _print_line(console, f"  {in_line(name):<{width}}  {_number(value)}", (mark, "dim"))
    data = "validation samples" if report.data == "validation" else f"samples in {in_line(report.data)}"
    _print_line(console, (f"  over {report.samples} {data}", "dim"))


def _classes(console: Console, report: ClassFigures) -> None:
    pixels = report.counted == "pixels"
    total = sum(row.truth for row in report.classes) or 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    figures = {"IoU": "iou", "Dice": "dice"} if pixels else {"F1": "dice"}
    figures |= {"precision": "precision", "recall": "recall"}
    table.add_column("class")
    for name in (*figures, report.counted):
        table.add_column(name, justify="right")
    # A class without truth or predictions has no Dice score.
    rows = sorted(report.classes, key=lambda row: row.dice or 0.0) if _many(report) else report.classes
    for row in rows[:MOST_CLASSES]:
        numbers = [_number(getattr(row, key), ".3f") for key in figures.values()]
        count = f"{row.truth / total:.1%}" if pixels else f"{row.truth:,}"
        table.add_row(_short(row.name), *numbers, count)
    console.print()
    console.print(table)
    if _many(report):
        _print_line(console, (f"the lowest {MOST_CLASSES} of {len(rows)} classes; --csv FILE writes them all", "dim"))


def _many(report: ClassFigures) -> bool:
    return len(report.classes) > MOST_CLASSES


def _confusion(console: Console, report: ClassFigures) -> None:
    names, counts = report.confusion.names, report.confusion.counts.tolist()
    console.print()
    if len(names) > MOST_COLUMNS:
        _mistakes(console, report)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("truth, taken for:")
    for name in names:
        table.add_column(_short(name)[:10], justify="right", no_wrap=True)
    for name, row in zip(names, counts, strict=True):
        total = sum(row)
        table.add_row(_short(name), *(f"{count / total:.1%}" if total else "-" for count in row))
    console.print(table)


def _mistakes(console: Console, report: ClassFigures) -> None:
    if not report.mistakes:
        console.print("nothing was taken for anything else")
        return
    console.print("most often taken for another:")
    for one in report.mistakes[:5]:
        pair = f"{_short(one.truth)} for {_short(one.answer)}"
        console.print(f"  {pair}: {one.count:,} {report.counted}, {one.share:.1%} of its own")


def _worst(console: Console, rows: Sequence[Columns]) -> None:
    console.print("\nthe worst:")
    for row in rows:
        words = [f"{key} {_figure(value)}" for key, value in row.items() if key != "file"]
        # As it would be typed in the current folder; names of samples that are no files stay.
        file = str(row["file"]).removeprefix(f"{os.getcwd()}{os.sep}")
        _print_line(console, f"  {in_line(file)}  {', '.join(words)}")


def _figure(value: Any) -> str:
    return in_line(value) if isinstance(value, str) else _number(value, ".3f")
