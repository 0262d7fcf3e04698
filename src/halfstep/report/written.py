"""`halfstep.report`: write one page about runs, benches and plans."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from halfstep.draw.notebook import PageResult
from halfstep.errors import StorageFailed, UnknownName, WrongUse, choose_caller_wording
from halfstep.files import write_text
from halfstep.page import Page, Paragraph, Span
from halfstep.report.compare import Comparison, compare_runs
from halfstep.report.examined import examine_run_model as examine_run
from halfstep.report.html import render_html_report
from halfstep.report.markdown import render_markdown_report
from halfstep.report.run_facts import RunFacts
from halfstep.report.sources import Source, read_sources
from halfstep.terminal import display_progress

FORMATS = {"html": ".html", "md": ".md"}


@dataclass(frozen=True)
class WrittenReport(PageResult):
    """A page that was written, and what it is about."""

    reports: tuple[Source, ...]
    """The runs, benches and plans, in the order given."""
    file: Path
    bytes: int
    comparison: Comparison | None
    """The comparison of several runs."""

    @property
    def runs(self) -> list[RunFacts]:
        """Return those of the reports that are about a run."""
        return [source for source in self.reports if isinstance(source, RunFacts)]

    @property
    def goes_on(self) -> bool:
        """Return whether a run of the page is not over."""
        return any(not run.is_over for run in self.runs)

    def page(self) -> Page:
        """Return the verdicts, and the file."""
        about = [self.comparison] if self.comparison else self.reports
        file = Paragraph((Span(str(self.file), strong=True), f" ({self.bytes / 1000:,.0f} kB)"), wrap=False)
        return Page("report", (*(Paragraph(one.verdict) for one in about), file))


def report(
    *paths: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    format: str = "html",
    examine: bool = False,
    refresh: int | None = None,
) -> WrittenReport:
    """Write an HTML report on runs, bench results and plans: verdict, curves, incidents, samples and sources.

    Args:
        paths: Folders of runs and benches, and files of `halfstep plan --json`; several runs are compared.
        output: The file to write; by default `report.html` in the given folder, or here for several.
        format: `html`, one file with everything in it, or `md`, for a pull request.
        examine: Rebuild the runs' models for formats, headroom, memory and risks; the results are kept in the runs'
            folders.
        refresh: Seconds after which the page of an unfinished run reloads itself.

    Returns:
        The file, its subject, and the comparison of several runs.

    Raises:
        BadData: A path holds none of these, or cannot be read.
        StorageFailed: The file cannot be written.
        UnknownName: The format is unknown.
        WrongUse: No path, too many of them, or a folder as the file.
    """
    places = [Path(path) for path in paths]
    file = _choose_report_file(places, output, format)
    if examine:
        for source in read_sources(places):
            if isinstance(source, RunFacts):
                with display_progress("examining", "parts") as on_progress:
                    examine_run(source.folder, source.chosen, on_progress)
    sources = read_sources(places)
    runs = [source for source in sources if isinstance(source, RunFacts)]
    if all(run.is_over for run in runs):
        refresh = None
    page = render_html_report(sources, refresh=refresh) if format == "html" else render_markdown_report(sources)
    try:
        write_text(file, page)
    except OSError as error:
        raise StorageFailed(
            f"{file} cannot be written: {error.strerror or error}",
            allowed="a place that this user can write to",
            do=choose_caller_wording("--output FILE", "output=FILE"),
        ) from None
    return WrittenReport(tuple(sources), file, len(page.encode()), compare_runs(runs) if len(runs) > 1 else None)


def _choose_report_file(paths: list[Path], output: str | os.PathLike[str] | None, format: str) -> Path:
    """Return the file to write; by default in the folder of the page's subject, or here for several."""
    if format not in FORMATS:
        raise UnknownName(
            choose_caller_wording(f"--format {format}", f"format={format!r}"),
            allowed=", ".join(FORMATS),
            do=choose_caller_wording("--format html", 'format="html"'),
        )
    if not paths:
        raise WrongUse("a report of nothing", allowed="runs, bench results and plans", do="name the folder of a run")
    if output is None:
        if len(paths) > 1:
            return Path(f"report{FORMATS[format]}")
        path = paths[0]
        return path / f"report{FORMATS[format]}" if path.is_dir() else path.with_suffix(FORMATS[format])
    file = Path(output)
    if file.is_dir():
        named = file / "report.html"
        raise WrongUse(
            f"{choose_caller_wording('--output ', 'output=')}{file} is a folder",
            allowed="a file",
            do=choose_caller_wording(f"--output {named}", f'output="{named}"'),
        )
    return file
