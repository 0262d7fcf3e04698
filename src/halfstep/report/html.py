"""Render sources as one HTML page that needs nothing else: no network, no fonts, no script."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.draw.html import html_document
from halfstep.page import Details, Page, Picture
from halfstep.report.compare import compare, comparison_page
from halfstep.report.pictures import pictures_of
from halfstep.report.run_facts import RunFacts
from halfstep.report.run_page import compared_run_blocks, run_page
from halfstep.report.sources import Source

MOST_BYTES = 1_000_000
"""The size of a page: small enough for a mail."""

Pictured = dict[int, tuple[list[Picture], list[str]]]
"""The pictures of each run by its index, and why others were left out."""


def page_of(sources: Sequence[Source], *, refresh: int | None = None) -> str:
    """Return the page of these sources; with `refresh`, one that loads itself again after so many seconds.

    Pictures take the room that the rest leaves below `MOST_BYTES`.
    """
    runs = [n for n, source in enumerate(sources) if isinstance(source, RunFacts)]
    title = _title(sources)
    without = html_document(pages_of(sources), title=title, refresh=refresh)
    room = MOST_BYTES - len(without.encode()) - 4000 * len(sources)
    pictured: Pictured = {}
    for n in runs:
        run = sources[n]
        assert isinstance(run, RunFacts)
        pictured[n] = pictures_of(run.folder, run.best[1], room // len(runs))
    return html_document(pages_of(sources, pictured), title=title, refresh=refresh) if pictured else without


def pages_of(sources: Sequence[Source], pictured: Pictured | None = None) -> list[Page]:
    """Return the pages of these sources; several runs become one page that compares them."""
    of_run = pictured or {}
    runs = {n: source for n, source in enumerate(sources) if isinstance(source, RunFacts)}
    pages = [source.page() for source in sources if not isinstance(source, RunFacts)]
    if len(runs) < 2:
        return [*(run_page(run, *of_run.get(n, ((), ()))) for n, run in runs.items()), *pages]
    each = tuple(
        Details(str(run.folder), compared_run_blocks(run, *of_run.get(n, ((), ())))) for n, run in runs.items()
    )
    return [comparison_page(compare(list(runs.values())), _title(list(runs.values())), each), *pages]


def _title(sources: Sequence[Source]) -> str:
    labels = list(dict.fromkeys(source.label for source in sources))
    return f"{len(sources)} runs of {labels[0]}" if len(labels) == 1 < len(sources) else ", ".join(labels)
