"""`halfstep doctor`: report on this device, or check whether the settings of a recipe agree with other sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._options import Json, OnDevice, flag, print_report
from halfstep.errors import CONFIGURATION, WrongUse

if TYPE_CHECKING:
    from halfstep.doctor.wheel import Build
    from halfstep.precision.hardware import Device
    from halfstep.precision.probe import Measurements

GROUP = "Trouble"


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe, or any project's YAML: check its settings, not the device.")
    ] = None,
    accelerate: Annotated[str | None, typer.Option(help="accelerate's default_config.yaml, to compare with.")] = None,
    deepspeed: Annotated[str | None, typer.Option(help="DeepSpeed's JSON configuration, to compare with.")] = None,
    device: OnDevice = None,
    precision: Annotated[str, typer.Option(help="The precision to ask for, in any spelling.")] = "auto",
    strict: Annotated[bool, flag("--strict", "Refuse rather than fall to another precision.")] = False,
    fresh: Annotated[bool, flag("--fresh", "Measure again instead of reading the cache.")] = False,
    formats: Annotated[bool, flag("--formats", "Instead: what fp32, bf16, fp16 and fp8 hold, and what for.")] = False,
    gpus: Annotated[bool, flag("--gpus", "Instead: the GPUs that are known, and what each should run in.")] = False,
    fix: Annotated[
        str | None, typer.Option(help="Make all settings ask for this precision, and write the files.", metavar="NAME")
    ] = None,
    json: Json = False,
) -> None:
    """Show what this device can do and which precision fits it; with a RECIPE, check whether its settings agree."""
    if recipe or accelerate or deepspeed:
        _refuse_device_options(device, precision, strict, **{"--fresh": fresh, "--formats": formats, "--gpus": gpus})
        _settings(recipe, accelerate, deepspeed, fix, json)
    elif fix:
        raise WrongUse("--fix without settings", allowed="--fix NAME after a RECIPE", do="name the file to mend")
    elif formats or gpus:
        _tables(formats, gpus, json)
    else:
        _device(examine(device, precision, strict=strict, fresh=fresh), json)


def _device(report: dict[str, Any], json: bool) -> None:
    from halfstep.cli.pages.layout import show

    print_report(report, json, show)
    # Scripts can check the exit code before they start a run.
    if any(finding["severity"] == "error" for finding in report["findings"]):
        raise typer.Exit(CONFIGURATION)


def _tables(formats: bool, gpus: bool, json: bool) -> None:
    from halfstep.cli.pages import known

    report = {**({"formats": known.format_rows()} if formats else {}), **({"gpus": known.gpu_rows()} if gpus else {})}
    print_report(report, json, known.show)


def _settings(recipe: str | None, accelerate: str | None, deepspeed: str | None, fix: str | None, json: bool) -> None:
    from halfstep.cli.pages.settings import show
    from halfstep.doctor.checkup import check_settings
    from halfstep.doctor.fixing import make_agree

    # Changed first, so that the report shows the settings as they are now.
    changed = make_agree(fix, recipe, accelerate=accelerate, deepspeed=deepspeed) if fix else []
    report = check_settings(recipe, accelerate=accelerate, deepspeed=deepspeed)
    report |= {"changed": [change._asdict() for change in changed]} if fix else {}
    print_report(report, json, show)
    if not report["status"]["aligned"]:
        raise typer.Exit(CONFIGURATION)


def _refuse_device_options(device: str | None, precision: str, strict: bool, **others: bool) -> None:
    given = {"--device": device, "--precision": precision != "auto", "--strict": strict, **others}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise WrongUse(
            f"{', '.join(wrong)} beside settings to check",
            allowed="a RECIPE with --accelerate, --deepspeed, --fix and --json; or a device report without them",
            do=f"leave out {', '.join(wrong)}, or ask for the device report by itself",
        )


def examine(
    device: str | None, precision: str, *, strict: bool = False, fresh: bool = False, build: Build | None = None
) -> dict[str, Any]:
    """Return the whole device report as plain data; `build` stands for another torch and other GPUs than those
    present.
    """
    from halfstep.doctor.wheel import check_build, read_build
    from halfstep.precision import flags
    from halfstep.precision.hardware import describe, facts
    from halfstep.precision.probe import measure
    from halfstep.precision.select import choose_precision

    here, build = describe(device), build or read_build()
    measured = measure(here, fresh=fresh)
    choice = choose_precision(precision, device=here, strict=strict, measured=measured)
    return {
        "device": {"name": here.name, "kind": here.kind, "place": here.place, "facts": facts(here)},
        "formats": _formats(here, measured),
        "measured": {"seconds": round(measured.seconds, 3), "how": measured.how, "cached": measured.cached},
        "flags": flags.read_flags(),
        "choice": {
            "asked": choice.asked,
            "took": choice.took,
            "precision": choice.precision.name,
            "summary": choice.precision.summary,
            "rungs": [rung._asdict() for rung in choice.rungs],
        },
        "build": build.as_dict(),
        "findings": [finding.as_dict() for finding in (*check_build(build), *choice.findings)],
    }


def _formats(here: Device, measured: Measurements) -> list[dict[str, Any]]:
    from halfstep.precision.hardware import FORMAT_NAMES, ability

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
