"""Render sources as Markdown for a pull request: sentences and tables, no pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from halfstep.draw.series import thinned
from halfstep.printable import in_line
from halfstep.report.compare import HEADS, compare
from halfstep.report.html import templates, view_of
from halfstep.report.run_facts import RunFacts
from halfstep.report.run_journal import curve_points
from halfstep.report.sources import Source

_SPECIAL = frozenset("\\`*_{}[]<>#|!~&$@")
"""Characters that Markdown, or GitHub's form of it, may take for markup, a mention or a formula."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def markdown_of(sources: Sequence[Source]) -> str:
    """Return these sources as Markdown; everything that comes from data is escaped and on one line."""
    runs = [source for source in sources if isinstance(source, RunFacts)]
    comparison = compare(runs) if len(runs) > 1 else None
    content = {
        "views": [view_of(source) for source in sources],
        "comparison": comparison,
        "differences": comparison.differences if comparison else None,
        "compared": HEADS,
        "sparks": {str(run.folder): sparkline(curve_points(run.recorded.steps, "loss").y) for run in runs},
    }
    return _environment().get_template("page.md.j2").render(content)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return templates(_shown)


def _shown(value: Any) -> Markup:
    # As Markup, because Jinja's own escaping is of HTML; what a macro returns is Markup already.
    return value if isinstance(value, Markup) else Markup(escaped(value))


def escaped(value: Any) -> str:
    """Return data as Markdown shows it literally, on one line."""
    return "".join(f"\\{c}" if c in _SPECIAL else c for c in in_line(value)).replace("://", ":\u200b//")


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Return a curve as a line of blocks; empty where it has no two finite numbers."""
    _, y = thinned(np.arange(len(values), dtype=float), np.array(values, float), width // 2)
    y = y[np.linspace(0, len(y) - 1, min(width, len(y))).astype(int)] if len(y) else y
    if len(y) < 2:
        return ""
    span = float(y.max() - y.min()) or 1.0
    return "".join(_BLOCKS[int((value - y.min()) / span * (len(_BLOCKS) - 1))] for value in y)
