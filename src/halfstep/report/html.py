"""Render sources as one HTML page that needs nothing else: no network, no fonts, no script."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.draw.html import render_html_document
from halfstep.page import Details, Page, Picture
from halfstep.report.compare import build_comparison_page, compare_runs
from halfstep.report.pictures import embed_pictures
from halfstep.report.run_facts import RunFacts
from halfstep.report.run_page import build_compared_run_blocks, build_run_page
from halfstep.report.sources import Source

MOST_BYTES = 1_000_000
"""The size of a page: small enough for a mail."""

Pictured = dict[int, tuple[list[Picture], list[str]]]
"""The pictures of each run by its index, and why others were left out."""


def render_html_report(sources: Sequence[Source], *, refresh: int | None = None) -> str:
    """Return the page of these sources; with `refresh`, one that loads itself again after so many seconds.

    Pictures take the room that the rest leaves below `MOST_BYTES`.
    """
    runs = [n for n, source in enumerate(sources) if isinstance(source, RunFacts)]
    title = _build_report_title(sources)
    without = render_html_document(build_report_pages(sources), title=title, refresh=refresh)
    room = MOST_BYTES - len(without.encode()) - 4000 * len(sources)
    pictured: Pictured = {}
    for n in runs:
        run = sources[n]
        assert isinstance(run, RunFacts)
        pictured[n] = embed_pictures(run.folder, run.best[1], room // len(runs))
    return (
        render_html_document(build_report_pages(sources, pictured), title=title, refresh=refresh)
        if pictured
        else without
    )


def build_report_pages(sources: Sequence[Source], pictured: Pictured | None = None) -> list[Page]:
    """Return the pages of these sources; several runs become one page that compares them."""
    of_run = pictured or {}
    runs = {n: source for n, source in enumerate(sources) if isinstance(source, RunFacts)}
    pages = [source.page() for source in sources if not isinstance(source, RunFacts)]
    if len(runs) < 2:
        return [*(build_run_page(run, *of_run.get(n, ((), ()))) for n, run in runs.items()), *pages]
    each = tuple(
        Details(str(run.folder), build_compared_run_blocks(run, *of_run.get(n, ((), ())))) for n, run in runs.items()
    )
    return [
        build_comparison_page(compare_runs(list(runs.values())), _build_report_title(list(runs.values())), each),
        *pages,
    ]


def _build_report_title(sources: Sequence[Source]) -> str:
    labels = list(dict.fromkeys(source.label for source in sources))
    return f"{len(sources)} runs of {labels[0]}" if len(labels) == 1 < len(sources) else ", ".join(labels)
