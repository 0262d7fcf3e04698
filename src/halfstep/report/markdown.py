"""Render sources as Markdown for a pull request: sentences and tables, no pictures."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.draw.markdown import render_markdown
from halfstep.report.html import build_report_pages
from halfstep.report.sources import Source


def render_markdown_report(sources: Sequence[Source]) -> str:
    """Return these sources as Markdown; everything that comes from data is escaped and on one line."""
    return "\n".join(map(render_markdown, build_report_pages(sources)))
