"""Print an export: the Python code that uses the file, and the file's facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from halfstep import numbers
from halfstep.printable import in_line
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.runs.export import ExportReport
    from halfstep.runs.printed_code import CodeChecked
    from halfstep.runs.sharded_export import ShardedExport

NAMES = 8
"""The most classes that are printed; the file has them all."""


def show(report: ExportReport) -> None:
    """Print the code first, because it is long; the facts come last, where a terminal ends."""
    console = screen()
    console.print(report.python, soft_wrap=True)
    size = f"{report.tensors} tensors, {numbers.size(report.bytes)}, {report.format}"
    console.print(Text.assemble("\n", (in_line(report.file), "bold"), f": {size}"), soft_wrap=True)
    lines = [
        f"{report.model} from {_origin(report)}",
        *_meaning(report),
        *_comparison(report),
        *_precision(report),
        f"sha256 {report.sha256}",
    ]
    for line in lines:
        console.print(Padding(Text(in_line(line)), (0, 0, 0, 2), expand=False))


def show_layout(report: ShardedExport) -> None:
    """Print the folder of a sharded layout and what is in it."""
    console, files = screen(), report.files
    size = f"{report.tensors} tensors, {numbers.size(report.bytes)}, in {len(files)} files"
    console.print(Text.assemble((in_line(report.folder), "bold"), f": {size}"), soft_wrap=True)
    average = ", averaged" if report.averaged else ""
    for line in (f"{report.source}{average}", f"{files[0]} to {files[-1]}" if len(files) > 1 else files[0]):
        console.print(Padding(Text(in_line(line)), (0, 0, 0, 2), expand=False))


def _origin(report: ExportReport) -> str:
    metric, value = report.metric.name, report.metric.value
    moment = [f"step {report.step:,}"] if report.step is not None else []
    moment += [f"epoch {report.epoch}"] if report.epoch is not None else []
    moment += [f"{metric} {value:.4f}"] if value is not None else []
    average = ", averaged" if report.averaged else ""
    return f"{report.source}{average}" + (f" ({', '.join(moment)})" if moment else "")


def _meaning(report: ExportReport) -> list[str]:
    """Return lines about input and output, which the file's metadata contains too."""
    taken, classes = report.preprocessing, report.classes or []
    if taken is None:
        return ["its task does not say what the model takes: the file has the weights alone"]
    size = f"longer side at most {taken.max_side}, " if taken.max_side else ""
    size += f"shorter side to {taken.resize}, middle {taken.crop} × {taken.crop}, " if taken.resize else ""
    mean, std = ([round(value, 4) for value in values] for values in (taken.mean, taken.std))
    more = f" and {len(classes) - NAMES} more" if len(classes) > NAMES else ""
    return [
        f"in: {taken.order}, {size}0 to 1, minus {mean}, divided by {std}; NCHW",
        f"out: {report.output}",
        f"classes: {', '.join(classes[:NAMES])}{more}",
    ]


def _comparison(report: ExportReport) -> list[str]:
    checked = report.checked
    if checked is None:
        return []
    return [
        f"checked on {checked.images} {checked.source}: numbers at most {checked.max_difference:.2g} apart",
        *([_code(checked.code, report.answer)] if checked.code else []),
        f"takes {checked.takes}",
    ]


def _code(code: CodeChecked, answer: str | None) -> str:
    if code.not_run is not None:
        return f"the printed code was not run: {code.not_run}"
    return (
        f"the printed code, run on {code.images} {code.source}: the class of `halfstep predict --precision fp32` "
        f"in {code.agreement:.2%} of the {'pixels' if answer == 'mask' else 'images'}"
    )


def _precision(report: ExportReport) -> list[str]:
    """Return a note where the run computes in 16 bits: the exported model computes in its stored fp32."""
    if report.trained_in == "fp32":
        return []
    asked = report.trained_in
    return [f"computes in fp32; the run's recipe says {asked}: `halfstep predict --precision fp32` is the same"]
