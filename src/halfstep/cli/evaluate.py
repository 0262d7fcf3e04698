"""`halfstep evaluate`: how good a run's weights are on its validation data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._precision import precision_word

if TYPE_CHECKING:
    from halfstep.tasks._finished import Finished

GROUP = "Run"


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/segmentation_tiny.")],
    weights: Annotated[str, typer.Option(help="best, last, or a .safetensors file.")] = "best",
    precision: Annotated[str | None, typer.Option(help="Another precision than the run's.")] = None,
    bf16: Annotated[bool, flag("--bf16", "The same as --precision bf16.")] = False,
    fp16: Annotated[bool, flag("--fp16", "The same as --precision fp16.")] = False,
    task: Annotated[Path | None, typer.Option(help="The file of the run's own task.", metavar="FILE")] = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Measure a run's weights on its validation data."""
    from halfstep.tasks._finished import open_finished
    from halfstep.tasks._folder import task_from_file

    own = task_from_file(task)[0] if task else None
    word = precision_word(precision, bf16=bf16, fp16=fp16)
    finished = open_finished(folder, weights=weights, precision=word, own=own)
    report = measure(finished)
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    else:
        _print(report, finished)


def measure(finished: Finished) -> dict[str, Any]:
    """The metrics, and what they were measured with."""
    from halfstep.cli._progress import progress
    from halfstep.train.evaluation import evaluate
    from halfstep.train.loaders import make_val_loader

    loader = make_val_loader(finished.task, finished.recipe, finished.device)
    left_out: list[Any] = []
    with progress("evaluating", "batches") as told:
        metrics = evaluate(
            finished.task,
            finished.model,
            loader,
            precision=finished.choice.precision,
            device=finished.device,
            progress=told,
            left_out=left_out.extend,
        )
    return {
        "run": str(finished.folder),
        "weights": str(finished.weights),
        "precision": finished.choice.precision.name,
        "device": finished.choice.device.name,
        "samples": len(loader.samples) - len(left_out),
        "left_out": [{"file": one.name, "reason": one.reason} for one in left_out],
        "metrics": metrics,
        "findings": [finding.as_dict() for finding in finished.choice.findings],
    }


def _print(report: dict[str, Any], finished: Finished) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{report['weights']}[/] in {report['precision']} on {report['device']}", soft_wrap=True)
    width = max(map(len, report["metrics"]))
    for name, value in report["metrics"].items():
        mark = "  [dim]the metric that decides[/]" if name == finished.task.metric else ""
        console.print(f"  {name:<{width}}  {value:.4f}{mark}")
    console.print(f"  [dim]over {report['samples']} validation samples[/]")
    for one in report["left_out"]:
        console.print(f"[yellow]left out[/] {one['file']}: {one['reason']}", soft_wrap=True)
    for finding in report["findings"]:
        console.print(f"[yellow]{finding['severity']} {finding['id']}[/]: {finding['evidence']}", soft_wrap=True)
