"""`halfstep report`: one page to look at, of runs, benches and plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._completion import run_folders
from halfstep.cli._options import Json, flag, print_json, storing
from halfstep.errors import INTERRUPTED, HalfstepError, UnknownName, WrongUse
from halfstep.terminal import progress, say, screen

if TYPE_CHECKING:
    from halfstep.report.sources import Source

GROUP = "Files"
FORMATS = {"html": ".html", "md": ".md"}
EVERY = 60
"""Seconds from one page to the next of a run that goes on."""
MOST_FAILURES = 10
"""Pages in a row that could not be written before watching ends."""


def run(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|BENCH|PLAN...",
            help="Folders of runs and benches, and files of `halfstep plan --json`; several runs are compared.",
            autocompletion=run_folders,
        ),
    ],
    format: Annotated[str, typer.Option(help="html: one file with everything in it; md: for a pull request.")] = "html",
    output: Annotated[
        Path | None,
        typer.Option(help="The file to write; report.html in the folder given if left out.", metavar="FILE"),
    ] = None,
    watch: Annotated[bool, flag("--watch", "Write it anew every minute until the runs have ended.")] = False,
    examine: Annotated[
        bool, flag("--examine", "Build the runs' models again: formats, headroom, memory and risks, kept beside them.")
    ] = False,
    json: Json = False,
) -> None:
    """Write one page about runs, benches and plans: the verdict, curves, incidents, samples, and where it came from."""
    if format not in FORMATS:
        raise UnknownName(f"--format {format}", allowed=", ".join(FORMATS), do="--format html")
    file = output or _default(paths, FORMATS[format])
    if file.is_dir():
        raise WrongUse(f"--output {file} is a folder", allowed="a file", do=f"--output {file / 'report.html'}")
    if examine:
        _examine(paths)
    write = partial(_write, paths, format, file, watch=watch, json=json)
    sources = write()
    if watch:
        try:
            _watch(sources, write)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _default(paths: Sequence[Path], suffix: str) -> Path:
    """Return the file beside what the page is about; of several, in the current folder."""
    if len(paths) > 1:
        return Path(f"report{suffix}")
    path = paths[0]
    return path / f"report{suffix}" if path.is_dir() else path.with_suffix(suffix)


def _examine(paths: Sequence[Path]) -> None:
    from halfstep.report.examined import examine
    from halfstep.report.run_facts import RunFacts
    from halfstep.report.sources import read_sources

    for source in read_sources(paths):
        if isinstance(source, RunFacts):
            with progress("examining", "parts") as on_progress:
                examine(source.folder, source.chosen, on_progress)


def _write(paths: Sequence[Path], format: str, file: Path, *, watch: bool, json: bool) -> list[Source]:
    """Write the page, print what it says in a sentence, and return what it is about."""
    from halfstep.files import write_text
    from halfstep.report.html import page_of
    from halfstep.report.markdown import markdown_of
    from halfstep.report.sources import read_sources

    sources = read_sources(paths)
    refresh = EVERY if watch and _goes_on(sources) else None
    page = page_of(sources, refresh=refresh) if format == "html" else markdown_of(sources)
    with storing(f"{file} cannot be written", allowed="a place that this user can write to", do="--output FILE"):
        write_text(file, page)
    _tell(sources, file, len(page.encode()), json)
    return sources


def _watch(sources: Sequence[Source], write: Callable[[], Sequence[Source]]) -> None:
    """Write the page every minute while a run goes on.

    What cannot be read or written for some minutes, such as a disk that is away, ends nothing.
    """
    failures = 0
    while _goes_on(sources):
        time.sleep(EVERY)
        try:
            sources, failures = write(), 0
        except HalfstepError as error:
            failures += 1
            if failures == MOST_FAILURES:
                raise
            screen(stderr=True).print(f"{error.given}; trying again in {EVERY} s", soft_wrap=True)


def _goes_on(sources: Sequence[Any]) -> bool:
    from halfstep.report.run_facts import RunFacts

    return any(isinstance(source, RunFacts) and not source.is_over for source in sources)


def _tell(sources: Sequence[Source], file: Path, size: int, json: bool) -> None:
    """Print the verdicts, and last the file with its size."""
    from halfstep.report.compare import compare
    from halfstep.report.run_facts import RunFacts

    runs = [source for source in sources if isinstance(source, RunFacts)]
    comparison = compare(runs) if len(runs) > 1 else None
    if json:
        found = {"reports": [source.as_dict() for source in sources], "file": str(file), "bytes": size}
        print_json({**found, "comparison": comparison.as_dict() if comparison else None})
        return
    for said in [comparison] if comparison else sources:
        say(said.verdict)
    for source in runs:
        if not source.is_over:
            say(f"{source.folder} goes on; --watch writes this page anew every minute")
    say(f"{file} ({size / 1000:,.0f} kB)")
