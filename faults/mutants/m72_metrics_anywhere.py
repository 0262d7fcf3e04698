"""A recipe writes its metrics wherever it says."""

from __future__ import annotations

from halfstep.runs import resolve

WHAT = "a recipe names a metrics file outside the run's folder"
ROWS = ("F55",)


def apply() -> None:
    resolve._refuse_outside_metrics = lambda metrics: None
