"""`halfstep estimate`: predict the memory of a step, on this or another device, without running it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._options import TAKES_SETTINGS, RecipeOrCase, end, flag, print_json, subject
from halfstep.errors import INTERRUPTED, WrongUse
from halfstep.terminal import progress

if TYPE_CHECKING:
    from halfstep.measure.memory.report import EstimateOptions
    from halfstep.measure.subject import Subject

GROUP = "Choose"
COMMAND = TAKES_SETTINGS
_BATCH, _RECOMPUTE = "train.batch_size", "train.checkpoint_activations"


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precision: Annotated[
        list[str] | None, typer.Option(help="One or several, by commas; fp32 and the device's own if left out.")
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option(help="Samples in a micro-batch, one or several; the case's own if left out.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="a100-80gb, rtx4090, t4, ..., a size such as 4GB, or here; may be repeated."),
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="Activations computed again in backward: on, off, both, or auto: where it needs that.")
    ] = "auto",
    world: Annotated[
        int | None, typer.Option(help="Ranks, to count what a step costs on that many, such as 1024.", min=1)
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of --world; nodes of 8 if left out.", min=1)] = None,
    sharding: Annotated[
        str | None, typer.Option(help="With --world: ddp, fsdp, hsdp, or auto: the least that fits.")
    ] = None,
    shard_size: Annotated[
        int | None, typer.Option(help="With --world: ranks that hold the model together.", min=1)
    ] = None,
    survive: Annotated[
        str | None, typer.Option(help="Instead: would it survive these formats, such as fp16,fp8_e4m3.")
    ] = None,
    no_search: Annotated[bool, flag("--no-search", "Leave out the search for the largest batch.")] = False,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Estimate how much memory a step takes, and the largest batch that fits, on any device, without running it."""
    asked = (device, precision, batch, recompute, not no_search)
    ranks = (world, nodes, sharding, shard_size)
    try:
        if any(given is not None for given in ranks):
            _scale(subject(recipe, context.args), asked, ranks, survive, json)
        else:
            _answer(subject(recipe, context.args), asked, survive, json)
    except KeyboardInterrupt:  # torch was being imported: there is no report yet
        raise typer.Exit(INTERRUPTED) from None


Asked = tuple[list[str] | None, list[str] | None, list[str] | None, str, bool]
RanksAsked = tuple[int | None, int | None, str | None, int | None]


def _options(asked: Asked) -> EstimateOptions:
    from halfstep.measure.memory.report import EstimateOptions

    device, precision, batch, recompute, search = asked
    return EstimateOptions(_words(device), _words(precision), _sizes(_words(batch)), recompute, search)


def _answer(wanted: Subject, asked: Asked, survive: str | None, json: bool) -> None:
    if survive is not None:
        _survive(wanted, _formats(survive), json)
        return
    from halfstep.measure.memory.report import report_of

    options = _options(asked)
    with progress("estimating", "precisions") as on_progress:
        report = report_of(wanted.describe, options, on_progress)
    report = {"subject": wanted.text, **report, "next": next_command(wanted, report)}
    if json:
        print_json(report)
    else:
        from halfstep.cli.pages.estimate import show

        show(report)
    end(bool(report.get("interrupted")))


def _words(given: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for text in given or () for word in text.split(",") if word.strip())


def _formats(text: str) -> tuple[str, ...]:
    names = _words([text])
    if not names:
        raise WrongUse(f"--survive {text!r}", allowed="formats, separated by commas", do="--survive fp16,fp8_e4m3")
    return names


def _sizes(words: tuple[str, ...]) -> tuple[int, ...]:
    wrong = [word for word in words if not word.isascii() or not word.isdigit()]
    if wrong:
        raise WrongUse(f"--batch {wrong[0]}", allowed="whole numbers, separated by commas", do="--batch 8,16")
    return tuple(int(word) for word in words)


def next_command(wanted: Subject, report: dict[str, Any]) -> str:
    """Return the command to type next."""
    typed = shlex.join([wanted.text, *wanted.settings])
    take = report["verdict"]["take"]
    if take is None:
        return f"halfstep estimate {typed} --device {_large_enough(report)}"
    if wanted.is_own_code:
        return f"halfstep plan {typed}"
    from halfstep.runs.resolve import with_changes

    changes = [f"--{take['precision']}", f"{_BATCH}={take['batch']}"]
    changes += [f"{_RECOMPUTE}=true"] if take["recompute"] else []
    return shlex.join(["halfstep", "train", *with_changes(wanted.text, wanted.settings, *changes)])


def _large_enough(report: dict[str, Any]) -> str:
    """Return a size that the smallest configuration fits into; a guess where nothing was estimated."""
    for page in report["devices"]:
        device = page["device"]
        peaks = [lever["peak"] for row in page["largest"] for lever in (row, *row["levers"])]
        peaks = peaks or [column["peak"] for column in page["columns"]]
        if peaks:
            return f"{int((min(peaks) / (1 - device['margin']) + device['reserved']) / 2**30) + 1}GB"
    return "24GB"


def _scale(wanted: Subject, asked: Asked, ranks: RanksAsked, survive: str | None, json: bool) -> None:
    """Print what a step costs on many ranks."""
    world, nodes, sharding, shard = ranks
    if survive is not None:
        raise WrongUse("--survive with --world", allowed="one question at a time", do="leave one of them out")
    if world is None:
        raise WrongUse("--nodes, --sharding or --shard-size alone", allowed="with --world", do="--world 1024")
    from halfstep.measure.scale.report import ScaleOptions, scale_report

    options = ScaleOptions(_options(asked), world, nodes, sharding or "auto", shard)
    with progress("counting", "layouts") as on_progress:
        report = {"subject": wanted.text, **scale_report(wanted.describe, options, on_progress)}
    if json:
        print_json(report)
    else:
        from halfstep.cli.pages.scale import show

        show(report)
    end(bool(report.get("interrupted")))


def _survive(wanted: Subject, formats: tuple[str, ...], json: bool) -> None:
    from halfstep.measure.survival import survival

    case = wanted.open()
    report: dict[str, Any] = {"subject": wanted.text, "survival": [], "interrupted": False}
    try:
        with progress("trying", "formats") as on_progress:
            for done, name in enumerate(formats, 1):
                report["survival"].append(survival(case, format_name=name).as_dict())
                on_progress(done, len(formats))
    except KeyboardInterrupt:
        report["interrupted"] = True
    if json:
        print_json(report)
    else:
        from halfstep.cli.pages.estimate import show_survival

        show_survival(report["survival"], shlex.join([wanted.text, *wanted.settings]))
    end(bool(report.get("interrupted")))
