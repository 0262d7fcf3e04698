"""`halfstep estimate`: predict the memory of a step, on this or another device, without running it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._options import TAKES_SETTINGS, RecipeOrCase, create_flag_option, print_json, subject
from halfstep.errors import INTERRUPTED, WrongUse
from halfstep.json_data import convert_to_json_data
from halfstep.precision.names import list_precision_names
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.measure.memory.page import EstimateReport
    from halfstep.measure.memory.report import EstimateOptions
    from halfstep.measure.scale.report import ScaleOptions
    from halfstep.measure.subject import Subject
    from halfstep.measure.survival_report import Survival

GROUP = "Choose"
COMMAND = TAKES_SETTINGS
_BATCH, _RECOMPUTE = "train.batch_size", "train.checkpoint_activations"


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precision: Annotated[
        list[str] | None, typer.Option(help="One or several, separated by commas. Default: fp32 and the device's.")
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option(help="Samples in a micro-batch, one or several. Default: the case's.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="a100-80gb, rtx4090, t4, ..., a size such as 4GB, or here; may be repeated."),
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="Recompute activations in backward: on, off, both, or auto (if needed).")
    ] = "auto",
    world: Annotated[
        int | None, typer.Option(help="Ranks, to count what a step costs on that many, such as 1024.", min=1)
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of --world. Default: 8 ranks a node.", min=1)] = None,
    sharding: Annotated[
        str | None, typer.Option(help="With --world: ddp, fsdp, hsdp, or auto: the least that fits.")
    ] = None,
    shard_size: Annotated[
        int | None, typer.Option(help="With --world: ranks that share one copy of the model.", min=1)
    ] = None,
    survive: Annotated[
        str | None, typer.Option(help="Instead: does it survive these formats, such as fp16,fp8_e4m3.")
    ] = None,
    no_search: Annotated[bool, create_flag_option("--no-search", "Skip the search for the largest batch.")] = False,
    json: Annotated[bool, create_flag_option("--json", "Print one JSON object.")] = False,
) -> None:
    """Estimate how much memory a step takes, and the largest batch that fits, on any device, without running it."""
    try:
        wanted = subject(recipe, context.args)
        several_ranks = any(given is not None for given in (world, nodes, sharding, shard_size))
        if several_ranks and survive is not None:
            raise WrongUse("--survive with --world", allowed="one question at a time", do="leave one of them out")
        if several_ranks and world is None:
            raise WrongUse("--nodes, --sharding or --shard-size alone", allowed="with --world", do="--world 1024")
        if survive is not None:
            names = _split_at_commas([survive])
            if not names:
                raise WrongUse(
                    f"--survive {survive!r}", allowed="formats, separated by commas", do="--survive fp16,fp8_e4m3"
                )
            _report_survival(wanted, names, json)
            return
        from halfstep.measure.memory.report import EstimateOptions

        options = EstimateOptions(
            _split_at_commas(device),
            _split_at_commas(precision),
            _parse_batch_sizes(_split_at_commas(batch)),
            recompute,
            not no_search,
        )
        if world is None:
            _report_estimate(wanted, options, json)
            return
        from halfstep.measure.scale.report import ScaleOptions

        _report_rank_costs(wanted, ScaleOptions(options, world, nodes, sharding or "auto", shard_size), json)
    except KeyboardInterrupt:  # torch was being imported: there is no report yet
        raise typer.Exit(INTERRUPTED) from None


def _report_estimate(wanted: Subject, options: EstimateOptions, json: bool) -> None:
    from halfstep.measure.memory.report import build_estimate_report

    with display_progress("estimating", "precisions") as on_progress:
        report = build_estimate_report(wanted.describe, options, on_progress)
    command = suggest_command_after_estimate(wanted, report)
    if json:
        print_json({"subject": wanted.text, **convert_to_json_data(report), "next": command})
    else:
        from halfstep.draw.terminal import show_page
        from halfstep.measure.memory.page import build_estimate_page

        show_page(build_estimate_page(report, command))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _split_at_commas(given: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for text in given or () for word in text.split(",") if word.strip())


def _parse_batch_sizes(words: tuple[str, ...]) -> tuple[int, ...]:
    wrong = [word for word in words if not word.isascii() or not word.isdigit()]
    if wrong:
        raise WrongUse(f"--batch {wrong[0]}", allowed="whole numbers, separated by commas", do="--batch 8,16")
    return tuple(int(word) for word in words)


def suggest_command_after_estimate(wanted: Subject, report: EstimateReport) -> str:
    """Return the command to type next."""
    typed = shlex.join([wanted.text, *wanted.settings])
    take = report.verdict.take
    if take is None:
        return f"halfstep estimate {typed} --device {_suggest_device_size(report)}"
    if wanted.is_own_code:
        return f"halfstep plan {typed}"
    from halfstep.runs.resolve import apply_setting_changes

    named = f"--{take.precision}" if take.precision in list_precision_names() else f"precision={take.precision}"
    changes = [named, f"{_BATCH}={take.batch}"]
    changes += [f"{_RECOMPUTE}=true"] if take.recompute else []
    return shlex.join(["halfstep", "train", *apply_setting_changes(wanted.text, wanted.settings, *changes)])


def _suggest_device_size(report: EstimateReport) -> str:
    """Return a size that the smallest configuration fits into; a guess where nothing was estimated."""
    for page in report.devices:
        peaks = [peak for row in page.largest for peak in (row.ledger.peak, *(lever.peak for lever in row.levers))]
        peaks = peaks or [column.peak for column in page.columns]
        if peaks:
            return f"{int((min(peaks) / (1 - page.device.margin) + page.device.reserved) / 2**30) + 1}GB"
    return "24GB"


def _report_rank_costs(wanted: Subject, options: ScaleOptions, json: bool) -> None:
    """Print what a step costs on many ranks."""
    from halfstep.measure.scale.report import build_scale_report

    with display_progress("counting", "layouts") as on_progress:
        report = build_scale_report(wanted.describe, options, on_progress)
    if json:
        print_json({"subject": wanted.text, **convert_to_json_data(report)})
    else:
        from halfstep.draw.terminal import show_page

        show_page(report.page())
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _report_survival(wanted: Subject, formats: tuple[str, ...], json: bool) -> None:
    from halfstep.measure.survival import survival

    case = wanted.open()
    found: list[Survival] = []
    interrupted = False
    try:
        with display_progress("trying", "formats") as on_progress:
            for done, name in enumerate(formats, 1):
                found.append(survival(case, format_name=name))
                on_progress(done, len(formats))
    except KeyboardInterrupt:
        interrupted = True
    if json:
        print_json({"subject": wanted.text, "survival": found, "interrupted": interrupted})
    else:
        from halfstep.draw.terminal import show_page
        from halfstep.measure.survival_report import build_survival_page

        show_page(build_survival_page(found, shlex.join([wanted.text, *wanted.settings])))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
