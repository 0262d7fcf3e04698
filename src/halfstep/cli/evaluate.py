"""`halfstep evaluate`: how good a run's weights are on its validation data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._opened import Bf16, Fp16, OwnTask, Precision, RunFolder, Weights, opened

if TYPE_CHECKING:
    from halfstep.tasks._finished import Finished

GROUP = "Run"


def run(
    folder: RunFolder,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Measure a run's weights on its validation data."""
    finished = opened(folder, weights, precision, bf16, fp16, task)
    report = measure(finished)
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    else:
        _print(report, finished)


def measure(finished: Finished) -> dict[str, Any]:
    """The metrics, and what they were measured with."""
    from halfstep.progress import progress
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
