"""`halfstep status`: whether a run is alive, as an exit code for probes."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli import _probe
from halfstep.cli._options import Json, RunFolder

GROUP = "Run"


def run(
    folder: RunFolder,
    max_age: Annotated[
        int,
        typer.Option(
            min=_probe.LEAST_AGE,
            max=_probe.LARGEST_AGE,
            help="Seconds without a heartbeat after which a rank counts as silent.",
        ),
    ] = _probe.MAX_AGE,
    rank: Annotated[
        int | None, typer.Option(min=0, max=_probe.LARGEST_RANK, help="Only this rank, as the probe of its pod.")
    ] = None,
    json: Json = False,
) -> None:
    """Report whether a run is alive: exit code 0 if every rank is making progress or the run has finished, 76 if a rank
    has stalled, otherwise the exit code of the run.

    Ranks write a heartbeat every 5 seconds, less often if they are more than 250. Ranks of other hosts are watched
    until they write one, so that no two clocks are compared. Loads no torch.
    """
    raise typer.Exit(_probe.answer(_probe.StatusQuery(folder, max_age, rank, json)))
