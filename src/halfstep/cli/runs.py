"""`halfstep runs`: list the runs of a folder with their state, the newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import Json, show_result

GROUP = "Run"


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs, or one run.")] = Path("runs"),
    most: Annotated[int, typer.Option(min=1, max=10_000, help="The most runs to list, the newest first.")] = 50,
    json: Json = False,
) -> None:
    """List the runs in a folder: state, precision, metric, steps, skipped steps, duration, age of the last write."""
    from halfstep.runs.listing import runs

    found = runs(folder, most)
    show_result(found, found.page(), json)
