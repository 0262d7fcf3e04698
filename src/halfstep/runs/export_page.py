"""The result of an export, and its page: the Python code that uses the file, and the file's facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.page import Code, Items, Page, Paragraph, Span
from halfstep.printable import escape_to_one_line
from halfstep.runs.export import FileComparison
from halfstep.runs.printed_code import CodeComparison
from halfstep.train.signature import Preprocessing

NAMES = 8
"""The most classes that are printed; the file has them all."""


@dataclass(frozen=True)
class ExportedMetric:
    """The metric that decides, and its value where exactly these weights were evaluated."""

    name: str
    value: float | None


@dataclass(frozen=True)
class ExportReport(PageResult):
    """A file that was written, where its weights come from, and how to use it."""

    run: Path
    file: Path
    format: str
    source: str
    """The weights file or the checkpoint they come from."""
    step: int | None
    epoch: int | None
    metric: ExportedMetric
    averaged: bool
    model: str
    trained_in: str
    """The precision of the run."""
    tensors: int
    bytes: int
    sha256: str
    preprocessing: Preprocessing | None
    """None, like the next three, where the task does not say what the model takes."""
    classes: list[str] | None
    output: str | None
    answer: str | None
    checked: FileComparison | None
    python: str
    """Code that predicts with the file."""

    def page(self) -> Page:
        """Return the code first, because it is long; the facts come last, where a terminal ends."""
        size = f"{self.tensors} tensors, {numbers.format_bytes(self.bytes)}, {self.format}"
        lines = [
            f"{self.model} from {_format_weights_origin(self)}",
            *_describe_model_io(self),
            *_describe_comparison(self),
            *_describe_fp32_export(self),
            f"sha256 {self.sha256}",
        ]
        return Page(
            f"export of {self.run}",
            (
                Code(self.python, "python"),
                Paragraph((Span(escape_to_one_line(self.file), strong=True), f": {size}"), gap=True, wrap=False),
                Items(tuple(map(escape_to_one_line, lines))),
            ),
        )


def _format_weights_origin(report: ExportReport) -> str:
    metric, value = report.metric.name, report.metric.value
    moment = [f"step {report.step:,}"] if report.step is not None else []
    moment += [f"epoch {report.epoch}"] if report.epoch is not None else []
    moment += [f"{metric} {value:.4f}"] if value is not None else []
    average = ", averaged" if report.averaged else ""
    return f"{report.source}{average}" + (f" ({', '.join(moment)})" if moment else "")


def _describe_model_io(report: ExportReport) -> list[str]:
    """Return lines about input and output, which the file's metadata contains too."""
    taken, classes = report.preprocessing, report.classes or []
    if taken is None:
        return ["its task does not describe the model's input: the file has only the weights"]
    size = f"longer side at most {taken.max_side}, " if taken.max_side else ""
    size += f"shorter side to {taken.resize}, middle {taken.crop} × {taken.crop}, " if taken.resize else ""
    mean, std = ([round(value, 4) for value in values] for values in (taken.mean, taken.std))
    more = f" and {len(classes) - NAMES} more" if len(classes) > NAMES else ""
    return [
        f"in: {taken.order}, {size}0 to 1, normalized with mean {mean} and std {std}; NCHW",
        f"out: {report.output}",
        f"classes: {', '.join(classes[:NAMES])}{more}",
    ]


def _describe_comparison(report: ExportReport) -> list[str]:
    checked = report.checked
    if checked is None:
        return []
    return [
        f"checked on {checked.images} {checked.source}: the outputs differ from those of the run's model by at most "
        f"{checked.max_difference:.2g}",
        *([_describe_code_check(checked.code, report.answer)] if checked.code else []),
        f"takes {checked.takes}",
    ]


def _describe_code_check(code: CodeComparison, answer: str | None) -> str:
    if code.not_run is not None:
        return f"the printed code was not run: {code.not_run}"
    predicts = "predicts the same class as `halfstep predict --precision fp32`"
    return (
        f"the printed code, run on {code.images} {code.source}, {predicts} for {code.agreement:.2%} "
        f"of the {'pixels' if answer == 'mask' else 'images'}"
    )


def _describe_fp32_export(report: ExportReport) -> list[str]:
    """Return a note where the run computes in 16 bits: the exported model computes in its stored fp32."""
    if report.trained_in == "fp32":
        return []
    asked = report.trained_in
    return [f"computes in fp32, although the run's recipe says {asked}; matches `halfstep predict --precision fp32`"]
