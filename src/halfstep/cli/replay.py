"""`halfstep replay`: run a failed step again here, name the origin of its non-finite values, and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._completion import complete_run_folders
from halfstep.cli._options import Json, OwnTask, create_flag_option, exit_if_interrupted, print_json
from halfstep.json_data import convert_to_json_data

GROUP = "Trouble"


def run(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, or one failed step of it: RUN/failed_steps/step-00000123.0001.",
            autocompletion=complete_run_folders,
        ),
    ],
    attempt: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which failed step. Default: the newest.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="The precision of the replay. Default: the step's.")] = None,
    list: Annotated[bool, create_flag_option("--list", "List the recorded failed steps, and run nothing.")] = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Run a failed step again; name the operation that produced the NaN, and report whether precision is the cause."""
    from halfstep.draw.terminal import show_page
    from halfstep.runs.replay import failed_steps, replay

    listing = failed_steps(folder)
    if list or not listing.failed_steps:
        _print_strict_json(listing) if json else show_page(listing.page())
        return
    report = replay(folder, attempt=attempt, precision=precision, task=task)
    _print_strict_json(report) if json else show_page(report.page())
    exit_if_interrupted(report.interrupted)


def _print_strict_json(report: object) -> None:
    """Print a report as JSON; non-finite numbers become words, as in the journal."""
    from halfstep.json_data import convert_to_strict_json

    print_json(convert_to_strict_json(convert_to_json_data(report)))
