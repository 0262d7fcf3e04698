"""`halfstep bench`: one recipe in several precisions, over the same seeds, in one table."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._flag import flag
from halfstep.cli._subject import TAKES_SETTINGS, RecipeOrCase, end, print_json, subject
from halfstep.errors import SOFTWARE
from halfstep.progress import progress

GROUP = "Choose"
COMMAND = TAKES_SETTINGS
_STOPPING = ("SIGTERM", "SIGHUP")


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    precisions: Annotated[
        str, typer.Option(help="Which, with commas; strict fp32 is always among them.")
    ] = "fp32,bf16",
    seeds: Annotated[int, typer.Option(help="Runs of each precision; 3 or more for a verdict on accuracy.")] = 3,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of the machine, in any currency: adds what training costs.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where runs and reports go; runs/bench-RECIPE if left out.", metavar="FOLDER")
    ] = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Train a recipe in several precisions: speed, memory and accuracy beside strict fp32.

    An interrupted bench goes on where it was, when it is started again with the same folder.
    """
    given = subject(recipe, context.args)
    from halfstep.measure.bench.bench import bench
    from halfstep.measure.bench.writing import check_folder, write_report

    words = [word for word in (part.strip() for part in precisions.split(",")) if word]
    folder = out or _folder(recipe)
    check_folder(folder, recipe)
    with signals_as_ctrl_c(), progress("bench", "jobs") as tell:
        found = bench(
            given, precisions=words, seeds=seeds, folder=folder, price_per_hour=price_per_hour, progress=tell
        )  # fmt: skip
    files = write_report(found, folder)
    report = {**found.as_dict(), "files": [str(path) for path in files]}
    if json:
        print_json(report)
    else:
        from halfstep.cli._bench_page import show

        show(found, files)
    end(report)
    if found.baseline.failed:  # nothing was compared
        raise typer.Exit(SOFTWARE)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """A system that stops us, and a terminal that goes away, end a bench as Ctrl-C does: with what there is."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = {which: signal.signal(which, stop) for name in _STOPPING if (which := getattr(signal, name, None))}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _folder(recipe: str) -> Path:
    label = Path(recipe.replace(":", "-")).stem if "/" in recipe else recipe.removesuffix(".yaml").replace(":", "-")
    return Path("runs") / f"bench-{label}"
