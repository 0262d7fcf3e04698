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
from halfstep.errors import WrongUse
from halfstep.printable import in_line, shortened
from halfstep.terminal import progress, screen

if TYPE_CHECKING:
    from halfstep.data.dataset import Batch
    from halfstep.data.loader import ValLoader
    from halfstep.runs.finished import Finished
    from halfstep.tasks.shared.confusion import Confusion
    from halfstep.train.evaluation import Choosing
    from halfstep.train.task import Task


WORST = 5
"""How many samples are listed as the worst."""
MISTAKES = 10
"""How many pairs of classes are listed as the most confused."""


@dataclass
class SampleScores:
    """Receives the same outputs as the metrics and stores them per sample."""

    task: Task
    choosing: Choosing
    rows: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)
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


@dataclass
class EvaluationReport:
    """The report as plain data, and the objects that pictures are drawn from."""

    report: dict[str, Any]
    loader: ValLoader
    choosing: Choosing
    confusion: Confusion | None


def measured(finished: Finished, data: str) -> EvaluationReport:
    """Evaluate the data in one pass; per-sample figures come from the outputs the metrics received."""
    from halfstep.tasks.shared.confusion import Confusion
    from halfstep.train.evaluation import Choosing
    from halfstep.train.loaders import make_val_loader

    loader = make_val_loader(finished.task, finished.recipe, finished.device)
    listener = SampleScores(finished.task, Choosing(finished.task))
    metrics, left_out = _evaluated(finished, loader, listener)
    counts = listener.counts
    confusion = Confusion(classes_of(finished.task, len(counts)), counts) if counts is not None else None
    report = {
        "run": str(finished.folder),
        "weights": str(finished.weights),
        "precision": finished.choice.precision.name,
        "device": finished.choice.device.name,
        "data": data,
        "samples": len(loader.samples) - len(left_out),
        "left_out": [{"file": one.name, "reason": one.reason} for one in left_out],
        "metric": finished.task.metric,
        "metrics": metrics,
        **(_figures(confusion, listener, loader) if confusion else {}),
        "findings": [finding.as_dict() for finding in finished.choice.findings],
    }
    return EvaluationReport(plain(report), loader, listener.choosing, confusion)


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


def _figures(confusion: Confusion, listener: SampleScores, loader: ValLoader) -> dict[str, Any]:
    name = loader.samples.source.name
    rows = sorted(listener.rows, key=lambda row: row[0])
    worst = sorted(rows, key=lambda row: row[1])[:WORST]
    return {
        "counted": _counted(listener.task),
        "classes": confusion.per_class(),
        "confusion": {"names": confusion.names, "counts": confusion.counts.tolist()},
        "mistakes": [
            {"truth": truth, "answer": said, "count": count, "share": share}
            for truth, said, count, share in confusion.mistakes(MISTAKES)
        ],
        "worst": [{"file": name(number), **row} for number, _, row in worst],
        "each": [{"file": name(number), **row} for number, _, row in rows],
    }


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
    found: EvaluationReport, finished: Finished, table: Path | None, picture: Path | None, samples: int
) -> list[Path]:
    """Write the requested files and return their paths. Raise `WrongUse` for a task without per-sample figures."""
    if (table or picture) and found.confusion is None:
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
        if table is not None:
            _write_tables(found.report, tables(table))
            written += tables(table)
        if picture is not None:
            _draw(found, finished, picture, samples)
            written.append(picture)
    return written


def _write_tables(report: dict[str, Any], files: Sequence[Path]) -> None:
    names, counts = report["confusion"]["names"], report["confusion"]["counts"]
    matrix = [{"truth": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, counts, strict=True)]
    for file, rows in zip(files, (report["each"], report["classes"], matrix), strict=True):
        write_csv(rows, file)


# -- the picture ------------------------------------------------------------------------------------------------------


def _draw(found: EvaluationReport, finished: Finished, file: Path, samples: int) -> None:
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
    value = report["metrics"][report["metric"]]
    heading = f"{finished.folder.name} on {report['data']}, {named(report['metric'])} {value:.4f}"
    picture = sheet(
        entries,
        heading,
        described_choice(chosen, found.choosing.total),
        finished.task.legend(),
        _pictured_figures(found),
    )
    write_png(file, picture)


def _pictured_figures(found: EvaluationReport) -> list[Any]:
    """Return the confusion matrix and the bars, side by side where both fit."""
    from halfstep.draw.confusion import MOST_SHOWN, bars, matrix
    from halfstep.draw.sheet import beside_or_below

    assert found.confusion is not None
    names, rows = found.confusion.names, found.confusion.per_class()
    # For single-label classes, Dice and F1 are the same number.
    key, heading = ("iou", "IoU of each class") if found.report["counted"] == "pixels" else ("dice", "F1 of each class")
    figures = [matrix(names, found.confusion.shares())] if len(names) <= MOST_SHOWN else []
    figures.append(bars(names, [float(row[key]) for row in rows], heading))
    return [beside_or_below(figures)]


# -- evaluated page ---------------------------------------------------------------------------------------------------
# The page `halfstep evaluate` prints: metrics, classes, confusions, and the worst samples.


MOST_CLASSES = 12
"""Rows of the table; the CSV has all classes."""
MOST_COLUMNS = 6
"""The most classes whose matrix fits into 80 columns."""
NAME = 18


def show(report: dict[str, Any], written: Sequence[Path]) -> None:
    """Print the page."""
    console = screen()
    where = f" in {report['precision']} on {in_line(report['device'])}"
    _print_line(console, (in_line(report["weights"]), "bold"), where)
    _metrics(console, report)
    if "classes" in report:
        _classes(console, report)
        _confusion(console, report)
        _worst(console, report)
    for one in report["left_out"]:
        _print_line(console, ("left out", "yellow"), in_line(f" {one['file']}: {one['reason']}"))
    for file in written:
        _print_line(console, "written: ", (in_line(file), "bold"))
    if "classes" in report and not written:
        _print_line(console, ("\n--csv FILE writes a row for each sample, --picture FILE.png draws the worst", "dim"))


def _print_line(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one line from words and (words, style) pairs."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def _short(name: str) -> str:
    return shortened(in_line(name), NAME)


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def _metrics(console: Console, report: dict[str, Any]) -> None:
    # Metrics of single classes are in their own table.
    own = {f"{kind}_{row['class']}" for row in report.get("classes", ()) for kind in ("iou", "dice")}
    shown = {name: value for name, value in report["metrics"].items() if name not in own}
    width = max(map(len, shown))
    for name, value in shown.items():
        mark = "  the metric that decides" if name == report["metric"] else ""
        _print_line(console, f"  {in_line(name):<{width}}  {_number(value)}", (mark, "dim"))
    data = "validation samples" if report["data"] == "validation" else f"samples in {in_line(report['data'])}"
    _print_line(console, (f"  over {report['samples']} {data}", "dim"))


def _classes(console: Console, report: dict[str, Any]) -> None:
    pixels = report["counted"] == "pixels"
    total = sum(row["truth"] for row in report["classes"]) or 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    figures = {"IoU": "iou", "Dice": "dice"} if pixels else {"F1": "dice"}
    figures |= {"precision": "precision", "recall": "recall"}
    table.add_column("class")
    for name in (*figures, report["counted"]):
        table.add_column(name, justify="right")
    # A class without truth or predictions has no Dice score.
    rows = sorted(report["classes"], key=lambda row: row["dice"] or 0.0) if _many(report) else report["classes"]
    for row in rows[:MOST_CLASSES]:
        numbers = [_number(row[key], ".3f") for key in figures.values()]
        count = f"{row['truth'] / total:.1%}" if pixels else f"{row['truth']:,}"
        table.add_row(_short(row["class"]), *numbers, count)
    console.print()
    console.print(table)
    if _many(report):
        _print_line(console, (f"the lowest {MOST_CLASSES} of {len(rows)} classes; --csv FILE writes them all", "dim"))


def _many(report: dict[str, Any]) -> bool:
    return len(report["classes"]) > MOST_CLASSES


def _confusion(console: Console, report: dict[str, Any]) -> None:
    names, counts = report["confusion"]["names"], report["confusion"]["counts"]
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


def _mistakes(console: Console, report: dict[str, Any]) -> None:
    if not report["mistakes"]:
        console.print("nothing was taken for anything else")
        return
    console.print("most often taken for another:")
    for one in report["mistakes"][:5]:
        pair = f"{_short(one['truth'])} for {_short(one['answer'])}"
        console.print(f"  {pair}: {one['count']:,} {report['counted']}, {one['share']:.1%} of its own")


def _worst(console: Console, report: dict[str, Any]) -> None:
    console.print("\nthe worst:")
    for row in report["worst"]:
        words = [f"{key} {_figure(value)}" for key, value in row.items() if key != "file"]
        # As it would be typed in the current folder; names of samples that are no files stay.
        file = row["file"].removeprefix(f"{os.getcwd()}{os.sep}")
        _print_line(console, f"  {in_line(file)}  {', '.join(words)}")


def _figure(value: Any) -> str:
    return in_line(value) if isinstance(value, str) else _number(value, ".3f")
