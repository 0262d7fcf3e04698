"""Render sources as Markdown for a pull request: sentences and tables, no pictures."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.draw.markdown import markdown
from halfstep.report.html import pages_of
from halfstep.report.sources import Source


def markdown_of(sources: Sequence[Source]) -> str:
    """Return these sources as Markdown; everything that comes from data is escaped and on one line."""
    return "\n".join(map(markdown, pages_of(sources)))
