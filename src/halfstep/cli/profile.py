"""`halfstep profile`: explain why a recipe or a case does not train faster in a lower precision."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli._options import (
    TAKES_SETTINGS,
    Json,
    OnDevice,
    RecipeOrCase,
    exit_if_interrupted,
    show_result,
    subject,
)
from halfstep.terminal import display_progress

GROUP = "Trouble"
COMMAND = TAKES_SETTINGS


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precision: Annotated[
        str | None, typer.Option(help="The precision that should be faster. Default: the recipe's.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60.0,
    device: OnDevice = None,
    json: Json = False,
) -> None:
    """Explain a missing speed-up over fp32: where a step's time goes, the main cause, and the command to run next."""
    examined = subject(recipe, context.args)
    from halfstep.measure.profile.profile import profile

    with display_progress("profiling", "%") as on_progress:
        found = profile(examined, precision=precision, seconds=seconds, device=device, progress=on_progress)
    show_result(found, found.page(), json)
    exit_if_interrupted(found.interrupted)
