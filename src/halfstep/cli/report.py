"""`halfstep report`: one page to look at, of runs, benches and plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._completion import complete_run_folders
from halfstep.cli._options import Json, create_flag_option, print_json
from halfstep.errors import INTERRUPTED, HalfstepError
from halfstep.terminal import create_console, print_plain_text

if TYPE_CHECKING:
    from halfstep.report.written import WrittenReport

GROUP = "Files"
EVERY = 60
"""Seconds between two pages of a running run."""
MOST_FAILURES = 10
"""Pages in a row that could not be written before watching ends."""


def run(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|BENCH|PLAN...",
            help="Folders of runs and bench results, and files of `halfstep plan --json`; several runs are compared.",
            autocompletion=complete_run_folders,
        ),
    ],
    format: Annotated[str, typer.Option(help="html: one file with everything in it; md: for a pull request.")] = "html",
    output: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: report.html in the given folder.", metavar="FILE"),
    ] = None,
    watch: Annotated[bool, create_flag_option("--watch", "Rewrite it every minute until the runs have ended.")] = False,
    examine: Annotated[
        bool,
        create_flag_option(
            "--examine", "Rebuild the runs' models: formats, headroom, memory and risks, saved with the runs."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write an HTML report on runs, bench results and plans: verdict, curves, incidents, samples and provenance."""
    from halfstep.report.written import report

    write = partial(report, *paths, output=output, format=format, refresh=EVERY if watch else None)
    written = write(examine=examine)
    _print_written_report(written, json)
    if watch:
        try:
            _rewrite_while_running(written, write, json)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _rewrite_while_running(written: WrittenReport, write: Callable[[], WrittenReport], json: bool) -> None:
    """Write the page every minute while a run continues.

    What cannot be read or written for some minutes, such as a disk that is away, ends nothing.
    """
    failures = 0
    while written.goes_on:
        time.sleep(EVERY)
        try:
            written, failures = write(), 0
            _print_written_report(written, json)
        except HalfstepError as error:
            failures += 1
            if failures == MOST_FAILURES:
                raise
            create_console(stderr=True).print(f"{error.given}; trying again in {EVERY} s", soft_wrap=True)


def _print_written_report(written: WrittenReport, json: bool) -> None:
    """Print the verdicts, and last the file with its size."""
    if json:
        print_json(written)
        return
    for about in [written.comparison] if written.comparison else written.reports:
        print_plain_text(about.verdict)
    for run in written.runs:
        if not run.is_over:
            print_plain_text(f"{run.folder} is running; --watch rewrites this page every minute")
    print_plain_text(f"{written.file} ({written.bytes / 1000:,.0f} kB)")
