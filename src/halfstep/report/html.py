"""Render sources as one HTML page that needs nothing else: no network, no fonts, no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from halfstep._version import __version__
from halfstep.printable import printable
from halfstep.report.bars import Bar, MemoryUse, ModelDrawing, kinds_in, memory_bars, model_drawing
from halfstep.report.compare import HEADS as COMPARED
from halfstep.report.compare import Comparison, compare
from halfstep.report.json_fields import fields, known, number, rows, text
from halfstep.report.outlook import estimate_columns, outlook_of_run
from halfstep.report.pictures import pictures_of
from halfstep.report.plan_facts import HEADS as PLANNED
from halfstep.report.plan_facts import PlanFacts, condition_rows
from halfstep.report.run_charts import compared, curves_of, headroom_of, memory_of, not_finite, speed_of
from halfstep.report.run_facts import RunFacts, figure_rows, incidents, precision_rows, provenance
from halfstep.report.run_journal import curve_points
from halfstep.report.sources import Source

MOST_BYTES = 1_000_000
"""The size of a page: small enough for a mail."""
TEMPLATES = Path(__file__).with_name("templates")
MOST_MODULES = 30
"""Modules in the table of headroom, the tightest first."""


def page_of(sources: Sequence[Source], *, refresh: int | None = None) -> str:
    """Return the page of these sources; with `refresh`, one that loads itself again after so many seconds.

    Pictures take the room that the rest leaves below `MOST_BYTES`.
    """
    views = [view_of(source) for source in sources]
    runs = [source for source in sources if isinstance(source, RunFacts)]
    content = {
        "views": views,
        "comparison": _comparison(runs) if len(runs) > 1 else None,
        "title": _title(sources),
        "made": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by halfstep {__version__}",
        "refresh": refresh,
        "style": _style(),
        "policy": _policy(),
    }
    template = jinja_environment().get_template("page.html.j2")
    without = template.render(content)
    room = MOST_BYTES - len(without.encode()) - 4000 * len(views)
    pictured = [view for view in views if view["kind"] == "run"]
    for view in pictured:
        run: RunFacts = view["run"]
        view["pictures"], view["left_out"] = pictures_of(run.folder, run.best[1], room // len(pictured))
    return template.render(content)


def _title(sources: Sequence[Source]) -> str:
    labels = list(dict.fromkeys(source.label for source in sources))
    return f"{len(sources)} runs of {labels[0]}" if len(labels) == 1 < len(sources) else ", ".join(labels)


@lru_cache(maxsize=1)
def jinja_environment() -> Environment:
    """Return the environment of the page: all data is escaped, and its control characters are made visible."""
    found = templates(_shown)
    found.filters |= {"slug": _slug, "kinds": kinds_in}
    return found


def templates(finalize: Callable[[Any], Any]) -> Environment:
    """Return an environment of the templates in which every value passes through `finalize` and is then escaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )


def _shown(value: Any) -> Any:
    # Jinja escapes after this; what a macro returns is Markup, and was escaped within it. Not strings alone: the name
    # of a folder comes as a Path.
    return value if isinstance(value, Markup | int | float) else printable(value)


def _slug(name: str) -> str:
    """Return a name as part of a class: letters and digits only."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())


@lru_cache(maxsize=1)
def _style() -> Markup:
    # A file of this package, no data.
    return Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))


def _policy() -> str:
    """Return a policy that allows this page's style by its digest, pictures within it, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(str(_style()).encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


# -- views ------------------------------------------------------------------------------------------------------------


def view_of(source: Source) -> dict[str, Any]:
    """Return all that the templates show of a source."""
    if isinstance(source, RunFacts):
        return _run(source)
    if isinstance(source, PlanFacts):
        return {"kind": "plan", "plan": source, "heads": PLANNED, "outlook": source.outlook, "verdict": source.verdict}
    return _bench(source)


def _run(run: RunFacts) -> dict[str, Any]:
    audit = fields(run.examined.get("audit"))
    return {
        "kind": "run",
        "run": run,
        "verdict": run.verdict,
        "precision": precision_rows(run),
        "figures": figure_rows(run),
        "curves": curves_of(run),
        "not_finite": not_finite(run),
        "speed": speed_of(run),
        "memory": _memory(run),
        "memory_curve": memory_of(run),
        "memory_notes": _memory_notes(run),
        "model": _model(audit),
        "audit": audit,
        "headroom": headroom_of(run),
        "tightest": sorted(run.recorded.headroom.items(), key=lambda item: item[1].value)[:MOST_MODULES],
        "modules": _modules(audit),
        "incidents": incidents(run),
        "outlook": outlook_of_run(run),
        "provenance": provenance(run),
        "recipe": run.recipe,
        "pictures": [],
        "left_out": [],
    }


def _memory(run: RunFacts) -> list[Bar]:
    measured = max(curve_points(run.recorded.speeds, "memory.device_peak_bytes").y, default=number(None))
    columns = [(text(fields(c.get("setting")).get("precision"), 20), c) for c in estimate_columns(run.examined)]
    uses = [
        MemoryUse(name, fields(column.get("at_peak")), measured if name == run.chosen else number(None))
        for name, column in columns
    ]
    if not any(use.name == run.chosen for use in uses) and known(measured):
        uses.append(MemoryUse(run.chosen, {}, measured))
    return memory_bars(uses)


def _memory_notes(run: RunFacts) -> list[str]:
    savings = rows(fields(fields(run.examined.get("estimate")).get("verdict")).get("savings"))
    why = [f"{text(row.get('precision'), 20)}: {text(row.get('why'), 400)}." for row in savings if row.get("why")]
    if not curve_points(run.recorded.speeds, "memory.device_peak_bytes").y:
        why.append(
            "The device's own allocator was not there to be read: on a CPU only the memory of the whole process is "
            "measured, most of which are libraries: the curve above."
        )
    return why


def _model(audit: dict[str, Any]) -> ModelDrawing | None:
    return model_drawing(audit) if audit else None


def _modules(audit: dict[str, Any]) -> list[tuple[str, str, str, str, float]]:
    """Return the modules with the least headroom: path, kind, formats, bits in words, and bits."""
    found = []
    for row in rows(audit.get("modules")):
        bits = number(fields(row.get("forward")).get("headroom_bits"))
        if known(bits):
            formats = ", ".join(fields(row.get("computed")))
            found.append((text(row.get("module"), 200), text(row.get("kind"), 80), formats, f"{bits:.1f}", bits))
    return sorted(found, key=lambda one: one[4])[:MOST_MODULES]


def _bench(source: Any) -> dict[str, Any]:
    from halfstep.report.bench_facts import loss_drawing, memory_drawing, parity_drawing, speed_drawing, subject

    heads, table, empty = source.table
    return {
        "kind": "bench",
        "bench": source,
        "verdict": source.verdict,
        "heads": heads,
        "table": table,
        "empty": empty,
        "subject": subject(source),
        "parity": parity_drawing(source),
        "speed": speed_drawing(source),
        "memory": memory_drawing(source),
        "curves": list(filter(None, [loss_drawing(source)])),
        "conditions": condition_rows(source.bench.conditions),
    }


def _comparison(runs: Sequence[RunFacts]) -> dict[str, Any]:
    found: Comparison = compare(runs)
    heads, differences = found.differences
    return {
        "verdict": found.verdict,
        "judgement": found.judgement,
        "heads": COMPARED,
        "table": found.table,
        "difference_heads": heads,
        "differences": differences,
        "curves": compared(found.runs),
    }
