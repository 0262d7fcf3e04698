"""`halfstep audit`: which format each part of a model is in, and which mistakes its numbers show."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._subject import INTERRUPTED, TAKES_SETTINGS, RecipeOrCase, end, print_json, subject
from halfstep.errors import WrongUse

if TYPE_CHECKING:
    from halfstep.measure.case import Subject

GROUP = "Trouble"
COMMAND = TAKES_SETTINGS
_BF16 = 'precision="bf16"'
"""The fix of an overflow that no island cures."""


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precision: Annotated[
        str | None, typer.Option(help="The precision to look at; the recipe's own, or the device's, if left out.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="One that is here; or a100-80gb, t4, ...: its formats by CUDA's rules, not run.")
    ] = None,
    every: Annotated[bool, flag("--all", "Show every module.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the model by format, as FILE.png.", metavar="FILE.png")
    ] = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Which format each part of a model is in, where its numbers do not fit, and mistakes that they show."""
    try:
        examined = subject(recipe, context.args)
        draw = _drawing(picture)
        report = _report(examined, precision, device)
    except KeyboardInterrupt:  # while torch was imported, or the case built: nothing is known yet
        if json:
            print_json(_nothing([recipe, *context.args], precision, device))
        raise typer.Exit(INTERRUPTED) from None
    if draw is not None and report["modules"]:
        draw(report, picture)
    if json:
        print_json(report)
    else:
        from halfstep.cli._audit_page import show

        show(report, every=every, picture=picture)
    end(report)


def _drawing(picture: Path | None) -> Any:
    """What draws, before anything is computed: a package that is missing is told at once."""
    if picture is None:
        return None
    if picture.suffix.lower() != ".png" or not picture.absolute().parent.is_dir():
        raise WrongUse(
            f"--picture {picture}", allowed="a .png file in a folder that is there", do="--picture formats.png"
        )
    from halfstep.draw.model_formats import draw_model_formats

    return draw_model_formats


def _nothing(words: list[str], precision: str | None, device: str | None) -> dict[str, Any]:
    """The report of an audit that had not begun: every key of one, and no torch."""
    asked = {"--precision": precision, "--device": device}
    again = [word for option, value in asked.items() if value is not None for word in (option, value)]
    return {
        "subject": " ".join(words), "verdict": "interrupted before a step was seen", "precision": precision,
        "format": None, "device": device, "run": False, "share": None, "island_share": 0.0, "flops": {}, "loss": None,
        "loss_scale": None, "modules": [], "islands": [], "findings": [], "notes": [], "stopped": None,
        "interrupted": True, "next": shlex.join(["halfstep", "audit", *words, *again]),
    }  # fmt: skip


def _report(examined: Subject, precision: str | None, device: str | None) -> dict[str, Any]:
    from halfstep.measure.audit.audit import audit
    from halfstep.progress import progress

    with progress("auditing", "stages") as told:
        report = audit(examined, precision=precision, device=device, progress=told).as_dict()
    return {**report, "next": next_command(examined, report, device)}


def next_command(examined: Subject, report: dict[str, Any], device: str | None = None) -> str:
    """What to type after reading the page."""
    typed = shlex.join([examined.text, *examined.settings])
    where = f" --device {shlex.quote(device)}" if device else ""
    again = f"halfstep audit {typed}{where} --precision"
    fixes = [one["fix"] for one in report["findings"] if one["severity"] != "note"]
    if _BF16 in fixes:
        return f"{again} bf16"
    if report["interrupted"] or fixes:
        return f"{again} {report['precision']}"
    if not report["run"]:
        return f"halfstep estimate {typed}{where}"
    if examined.is_own_code:
        return f"halfstep plan {typed}"
    kept = [word for word in examined.settings if not word.lstrip("-").startswith("precision")]
    return shlex.join(["halfstep", "train", examined.text, *kept, f"--{report['precision']}"])
