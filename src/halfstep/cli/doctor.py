"""`halfstep doctor`: what this device is, what it does natively and how fast, and what `auto` would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag

if TYPE_CHECKING:
    from halfstep.precision.abilities import Device
    from halfstep.precision.ladder import Choice
    from halfstep.precision.measurements import Measurements

GROUP = "Trouble"


def run(
    device: Annotated[
        str | None, typer.Option(help="A device as torch names it; the best one present if left out.")
    ] = None,
    precision: Annotated[str, typer.Option(help="The precision to ask for, in any spelling.")] = "auto",
    strict: Annotated[bool, flag("--strict", "Refuse rather than fall to another precision.")] = False,
    fresh: Annotated[bool, flag("--fresh", "Measure again instead of reading the cache.")] = False,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """What this device can do, how fast, and what it should run in."""
    report = examine(device, precision, strict=strict, fresh=fresh)
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    else:
        from halfstep.cli._doctor_page import show

        show(report)


def examine(device: str | None, precision: str, *, strict: bool = False, fresh: bool = False) -> dict[str, Any]:
    """Everything that doctor knows, as plain data."""
    from halfstep.precision import flags
    from halfstep.precision.abilities import facts
    from halfstep.precision.hardware import describe
    from halfstep.precision.ladder import choose_precision
    from halfstep.precision.probe import measure

    here = describe(device)
    measured = measure(here, fresh=fresh)
    choice = choose_precision(precision, device=here, strict=strict, measured=measured)
    return {
        "device": {"name": here.name, "kind": here.kind, "place": here.place, "facts": facts(here)},
        "formats": _formats(here, measured),
        "measured": {"seconds": round(measured.seconds, 3), "how": measured.how, "cached": measured.cached},
        "flags": flags.read_flags(),
        "choice": _choice(choice),
        "findings": [finding.as_dict() for finding in choice.findings],
    }


def _formats(here: Device, measured: Measurements) -> list[dict[str, Any]]:
    from halfstep.precision.abilities import FORMAT_NAMES, ability

    return [
        {
            "name": name,
            "native": ability(here, name).native,
            "reason": ability(here, name).reason,
            "speedups": dict(measured.speedups.get(name, {})),
            "combined": measured.combined(name),
            "not_measured": measured.failures.get(name, ""),
        }
        for name in FORMAT_NAMES
    ]


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "asked": choice.asked,
        "took": choice.took,
        "precision": choice.precision.name,
        "summary": choice.precision.summary,
        "rungs": [rung._asdict() for rung in choice.rungs],
    }
