"""`halfstep audit`: show the format of each part of a model, and precision mistakes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._options import (
    TAKES_SETTINGS,
    Json,
    RecipeOrCase,
    create_flag_option,
    exit_if_interrupted,
    print_json,
    subject,
)
from halfstep.draw.svg import check_svg_path, write_svg
from halfstep.errors import GAVE_UP, INTERRUPTED
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.measure.audit.page import Audit
    from halfstep.measure.subject import Subject

GROUP = "Trouble"
COMMAND = TAKES_SETTINGS
_BF16 = 'precision="bf16"'
"""The fix of an overflow that no island resolves."""
_WIDER = {"fp16": "bf16", "bf16": "fp32", "tf32": "fp32"}


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precision: Annotated[
        str | None, typer.Option(help="The precision to audit. Default: the recipe's, or the device's.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A device of this machine; or a100-80gb, t4, ...: formats by CUDA's rules, not run."),
    ] = None,
    every: Annotated[bool, create_flag_option("--all", "Show every module.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the model by format, as FILE.svg.", metavar="FILE.svg")
    ] = None,
    json: Json = False,
) -> None:
    """Show which format each module computes in, where values overflow or underflow, and precision mistakes.

    It exits with 80 where a finding is an error: a step in this precision fails, or is wrong.
    """
    if picture is not None:
        check_svg_path(picture, "--picture")  # the audit may take minutes
    try:
        examined = subject(recipe, context.args)
        from halfstep.measure.audit.audit import audit

        with display_progress("auditing", "stages") as on_progress:
            found = audit(examined, precision=precision, device=device, progress=on_progress)
    except KeyboardInterrupt:  # torch was being imported or the case built: there is no report yet
        if json:
            print_json(_build_empty_report([recipe, *context.args], precision, device))
        raise typer.Exit(INTERRUPTED) from None
    from halfstep.draw.terminal import show_page
    from halfstep.measure.audit.page import build_audit_page, draw_format_tree

    command = suggest_command_after_audit(examined, found, device)
    if picture is not None and found.rows:
        write_svg([draw_format_tree(found)], picture, f"{found.subject}: {found.verdict}")
    if json:
        print_json({**found.as_dict(), "next": command})
    else:
        show_page(build_audit_page(found, every=every, picture=picture, command=command))
    exit_if_interrupted(found.interrupted)
    if any(one.finding.severity == "error" for one in found.spotted):
        raise typer.Exit(GAVE_UP)


def _build_empty_report(words: list[str], precision: str | None, device: str | None) -> dict[str, object]:
    """Return the report of an audit that had not started: all keys, without torch."""
    asked = {"--precision": precision, "--device": device}
    again = [word for option, value in asked.items() if value is not None for word in (option, value)]
    return {
        "subject": " ".join(words), "verdict": "interrupted before a step was seen", "precision": precision,
        "format": None, "device": device, "run": False, "share": None, "island_share": 0.0, "flops": {}, "loss": None,
        "loss_scale": None, "modules": [], "islands": [], "findings": [], "notes": [], "stopped": None,
        "interrupted": True, "next": shlex.join(["halfstep", "audit", *words, *again]),
    }  # fmt: skip


def suggest_command_after_audit(examined: Subject, found: Audit, device: str | None = None) -> str:
    """Return the command to type next: never the one that was typed, unless it was interrupted."""
    words = [examined.text] if examined.is_own_code else _list_words_without_precision(examined)
    typed = shlex.join(words)
    where = f" --device {shlex.quote(device)}" if device else ""
    again = f"halfstep audit {typed}{where} --precision"
    serious = [one.finding for one in found.spotted if one.finding.severity != "note"]
    # Where bf16 resolves an overflow, the next audit shows whether it does.
    if any(finding.fix == _BF16 for finding in serious):
        return f"{again} bf16"
    if found.interrupted:
        return f"{again} {found.precision}"
    if not found.run:
        return f"halfstep estimate {typed}{where}"
    # Whether the format is at fault: the same step in a wider one.
    if serious and found.precision in _WIDER:
        return f"{again} {_WIDER[found.precision]}"
    if serious and examined.is_own_code:
        return "halfstep doctor ."
    if examined.is_own_code:
        return f"halfstep plan {typed}"
    return f"halfstep train {typed} --{found.precision}"


def _list_words_without_precision(examined: Subject) -> list[str]:
    from halfstep.runs.resolve import remove_precision  # the trainer, which a case does not need

    return remove_precision(examined.text, examined.settings)
