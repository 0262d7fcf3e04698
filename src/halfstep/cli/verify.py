"""`halfstep verify`: check every byte of a run's checkpoints, and whether a resume is exact."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli._options import OwnTask, RunFolder, create_flag_option, show_result
from halfstep.errors import WrongUse

GROUP = "Files"
STEPS = 3


def run(
    folder: RunFolder,
    resume: Annotated[
        bool, create_flag_option("--resume", "Also prove that a resume is exact, in a temporary folder.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help=f"With --resume: compare K + K steps with 2 K; {STEPS} by default."),
    ] = None,
    data: Annotated[
        bool, create_flag_option("--data", "Also read all data of the run, and compare it with its index.")
    ] = False,
    task: OwnTask = None,
    json: Annotated[bool, create_flag_option("--json", "Print one JSON object.")] = False,
) -> None:
    """Check every byte of a run's checkpoints. Read-only; safe while the run is training."""
    if not resume and (steps is not None or (task is not None and not data)):
        raise WrongUse(
            f"--{'steps' if steps is not None else 'task'} without --resume",
            allowed="--steps and --task with --resume, which trains a few steps",
            do=f"halfstep verify {folder} --resume",
        )
    from halfstep.runs.verify import verify

    report = verify(folder, resume_steps=(steps or STEPS) if resume else None, data=data, task=task)
    show_result(report, report.checked_page(), json)
    if report.error is not None:
        raise report.error
