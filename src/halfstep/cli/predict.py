"""`halfstep predict`: what a run's model says about the images in a folder, or makes by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._opened import Bf16, Fp16, OwnTask, Precision, RunFolder, Weights, opened

GROUP = "Run"
COMMAND = {"context_settings": {"ignore_unknown_options": True}}


def run(
    folder: RunFolder,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [KEY=VALUE]...",
            help="Images or clips, in any folders below FOLDER, or one file; then settings of how it is done.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN/predictions if left out.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Without FOLDER: how many pictures are made.")] = 40,
    columns: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Without FOLDER: pictures in a row; 10 where they fit.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Without FOLDER: decides what is drawn.")] = 0,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Predict masks or classes for images, or objects in clips; without FOLDER, make pictures with the model alone.

    Writes pictures where the task draws, and a table of values; or one picture of all samples. A setting after it
    changes how it is done, not what was learnt: model.guidance=4, or --sample_steps 100.
    """
    from halfstep.cli._predicted_place import check_place
    from halfstep.cli._predicted_settings import changed, folder_and_settings

    images, settings = folder_and_settings(rest or [])
    finished = changed(opened(folder, weights, precision, bf16, fp16, task), settings)
    place = out or folder / "predictions"
    check_place(place)
    if images is None:
        from halfstep.cli._predicted_samples import drawn

        report = drawn(finished, place, samples=samples, columns=columns, seed=seed)
    else:
        from halfstep.cli._predicted_folder import predict

        report = predict(finished, images, place)
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    where = f"in {report['precision']} on {report['device']}"
    if "picture" in report:
        made = f"[bold]{report['samples']} samples[/] {where}, seed {report['seed']}"
        console.print(f"{made}: [bold]{report['picture']}[/]", soft_wrap=True)
        return
    for bad in report["unreadable"]:
        console.print(f"[yellow]left out[/] {bad['file']}: {bad['reason']}", soft_wrap=True)
    unit = "clips" if "clips" in report else "images"
    what = " and ".join([f"{kind}s" for kind in report["pictures"]] + ["a table"])
    many = f"{report[unit]} {unit if report[unit] != 1 else unit[:-1]}"
    console.print(f"[bold]{many}[/] {where}: {what} in [bold]{report['out']}[/]", soft_wrap=True)
