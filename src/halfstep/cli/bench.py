"""`halfstep bench`: train one recipe in several precisions or configurations over the same seeds, and compare."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
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
from halfstep.errors import SOFTWARE
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.measure.subject import Subject

GROUP = "Choose"
COMMAND = TAKES_SETTINGS
_STOPPING = ("SIGTERM", "SIGHUP")


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precisions: Annotated[
        str, typer.Option(help="The precisions, separated by commas; strict fp32 is always included.")
    ] = "fp32,bf16",
    configs: Annotated[
        bool,
        create_flag_option(
            "--configs", "Compare AMP, AMP with twice the batch and compiled AMP with the baseline instead."
        ),
    ] = False,
    arm: Annotated[
        list[str] | None,
        typer.Option(help='A configuration to compare, "NAME: SETTING SETTING"; may be repeated.', metavar="ARM"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each precision; 3 or more for a verdict on accuracy.")] = 3,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Price of the machine, in any currency: adds the cost of training.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of runs and reports. Default: runs/bench-RECIPE.", metavar="FOLDER")
    ] = None,
    json: Json = False,
) -> None:
    """Train a recipe in several precisions or configurations, and compare speed, memory and accuracy with strict fp32.

    To resume an interrupted bench, run it again with the same --out.
    """
    given = subject(recipe, context.args)
    from halfstep.measure.bench.bench import bench
    from halfstep.measure.bench.page import build_bench_page, check_report_folder, write_bench_report

    words = [word for word in (part.strip() for part in precisions.split(",")) if word]
    arms = _resolve_candidates(given, words, configs, arm or [])
    label = Path(recipe.replace(":", "-")).stem if "/" in recipe else recipe.removesuffix(".yaml").replace(":", "-")
    folder = out or Path("runs") / f"bench-{label}"
    # Before any training: the folder may belong to another bench.
    check_report_folder(folder, recipe)
    with interrupt_on_signals(), display_progress("bench", "jobs") as tell:
        found = bench(
            given, precisions=words, arms=arms, seeds=seeds, folder=folder, price_per_hour=price_per_hour, progress=tell
        )  # fmt: skip
    files = write_bench_report(found, folder)
    if json:
        print_json({**found.as_dict(), "files": files})
    else:
        from halfstep.draw.terminal import show_page

        show_page(build_bench_page(found, files))
    exit_if_interrupted(found.interrupted)
    if found.baseline.failed:  # no comparison without a baseline
        raise typer.Exit(SOFTWARE)


def _resolve_candidates(
    given: Subject, precisions: list[str], configs: bool, more: list[str]
) -> dict[str, tuple[str, ...]] | None:
    """Return settings by the name of a candidate; None if the candidates are precisions."""
    from halfstep.measure.bench.comparison import parse_arms
    from halfstep.precision.names import parse_precision

    if not configs and not more:
        return None
    names = [parse_precision(word).name for word in precisions]
    lower = next((name for name in names if name not in ("fp32", "tf32")), "bf16")
    # A case has no usual arms; `bench` refuses them.
    usual = _list_usual_arms(given, lower) if configs and not given.is_own_code else {}
    return {**usual, **parse_arms(more)}


def _list_usual_arms(given: Subject, precision: str) -> dict[str, tuple[str, ...]]:
    from halfstep.runs.bench_recipe import list_usual_arms  # the trainer, which a case does not need

    return list_usual_arms(given, precision)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that a bench ends with the results so far."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # Windows has no SIGHUP.
    before = {which: signal.signal(which, stop) for name in _STOPPING if (which := getattr(signal, name, None))}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
