"""The options with which commands open a run again, and the run that they open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._flag import flag
from halfstep.precision.names import read_settings

if TYPE_CHECKING:
    from halfstep.tasks._finished import Finished

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/segmentation_tiny.")]
Weights = Annotated[str, typer.Option(help="best, last, or a .safetensors file.")]
Precision = Annotated[str | None, typer.Option(help="Another precision than the run's.")]
Bf16 = Annotated[bool, flag("--bf16", "The same as --precision bf16.")]
Fp16 = Annotated[bool, flag("--fp16", "The same as --precision fp16.")]
OwnTask = Annotated[Path | None, typer.Option(help="The file of the run's own task.", metavar="FILE")]


def opened(folder: Path, weights: str, precision: str | None, bf16: bool, fp16: bool, task: Path | None) -> Finished:
    """The run with these weights, in the precision that the options ask for together."""
    asked = {"precision": precision, "bf16": bf16 or None, "fp16": fp16 or None}
    named = read_settings({key: value for key, value in asked.items() if value is not None})
    from halfstep.tasks._finished import open_finished
    from halfstep.tasks._folder import task_from_file

    own = task_from_file(task)[0] if task else None
    return open_finished(folder, weights=weights, precision=named.name if named else None, own=own)
