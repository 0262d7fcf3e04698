"""`halfstep doctor`: what this device can do, or, given a recipe, whether its settings agree with everyone else's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.errors import CONFIGURATION, WrongUse

if TYPE_CHECKING:
    from halfstep.precision.abilities import Device
    from halfstep.precision.ladder import Choice
    from halfstep.precision.measurements import Measurements

GROUP = "Trouble"


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe, or any project's YAML: check its settings, not the device.")
    ] = None,
    accelerate: Annotated[str | None, typer.Option(help="accelerate's default_config.yaml, to compare with.")] = None,
    deepspeed: Annotated[str | None, typer.Option(help="DeepSpeed's JSON configuration, to compare with.")] = None,
    device: Annotated[
        str | None, typer.Option(help="A device as torch names it; the best one present if left out.")
    ] = None,
    precision: Annotated[str, typer.Option(help="The precision to ask for, in any spelling.")] = "auto",
    strict: Annotated[bool, flag("--strict", "Refuse rather than fall to another precision.")] = False,
    fresh: Annotated[bool, flag("--fresh", "Measure again instead of reading the cache.")] = False,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """What this device can do and should run in; with a RECIPE, whether its settings agree."""
    if recipe or accelerate or deepspeed:
        _refuse_device_options(device, precision, strict, fresh)
        _settings(recipe, accelerate, deepspeed, json)
        return
    report = examine(device, precision, strict=strict, fresh=fresh)
    if json:
        _print_json(report)
    else:
        from halfstep.cli._doctor_page import show

        show(report)


def _settings(recipe: str | None, accelerate: str | None, deepspeed: str | None, json: bool) -> None:
    from halfstep.doctor.checkup import check_settings

    report = check_settings(recipe, accelerate=accelerate, deepspeed=deepspeed)
    if json:
        _print_json(report)
    else:
        from halfstep.cli._settings_page import show

        show(report)
    if not report["status"]["aligned"]:
        raise typer.Exit(CONFIGURATION)


def _refuse_device_options(device: str | None, precision: str, strict: bool, fresh: bool) -> None:
    given = {"--device": device, "--precision": precision != "auto", "--strict": strict, "--fresh": fresh}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise WrongUse(
            f"{', '.join(wrong)} beside settings to check",
            allowed="a RECIPE with --accelerate, --deepspeed and --json; or a device report without them",
            do=f"leave out {', '.join(wrong)}, or ask for the device report by itself",
        )


def _print_json(report: dict[str, Any]) -> None:
    from json import dumps

    typer.echo(dumps(report, indent=1))


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
