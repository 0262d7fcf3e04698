"""Examine the model of a run once, and keep the findings in its folder: formats, headroom, memory, survival.

A report itself only reads. Facts that need the model to be built again are not in the journal; they are measured on
request, with random weights and the recipe's own data, and stay in the run's folder for every later report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError
from halfstep.files import read_json, write_json
from halfstep.json_data import json_data
from halfstep.report.json_fields import fields
from halfstep.train.run_folder import recipe_in

if TYPE_CHECKING:
    from halfstep.measure.audit.page import Audit
    from halfstep.measure.survival_report import Survival

EXAMINED = "examined.json"
FORMAT = 1
PARTS = ("estimate", "audit", "survival")


def read_examination(run: Path) -> dict[str, Any]:
    """Return the findings about the model of this run's current recipe; empty if there are none."""
    found = fields(read_json(run / EXAMINED))
    if found.get("format") != FORMAT or found.get("recipe") != _digest(run):
        return {}
    return {part: found[part] for part in (*PARTS, "failed") if part in found}


def examine(run: Path, precision: str, on_progress: Callable[[int, int], None]) -> None:
    """Build the model of a run's recipe, find formats, headroom, memory and survival, and keep them in its folder.

    A part that fails is left out, with the reason under `failed`: a task of the user's own needs its file.
    """
    failed: dict[str, str] = {}
    found = {"format": FORMAT, "recipe": _digest(run), "precision": precision, "failed": failed}
    for done, (part, look) in enumerate(_LOOKS.items()):
        on_progress(done, len(_LOOKS))
        try:
            found[part] = look(str(recipe_in(run)), precision)
        except HalfstepError as error:
            failed[part] = error.given
    write_json(run / EXAMINED, json_data(found))


def _digest(run: Path) -> str:
    return hashlib.sha256(recipe_in(run).read_bytes()).hexdigest()


def _estimate(recipe: str, precision: str) -> object:
    from halfstep.measure.memory.report import EstimateOptions, report_of
    from halfstep.measure.subject import Subject

    return json_data(report_of(Subject(recipe).open, EstimateOptions(precisions=("fp32", precision))))


def _audit(recipe: str, precision: str) -> Audit:
    from halfstep.measure.audit.audit import audit
    from halfstep.measure.subject import Subject

    return audit(Subject(recipe), precision=precision)


def _survival(recipe: str, precision: str) -> list[Survival]:
    from halfstep.measure.subject import Subject
    from halfstep.measure.survival import survival

    case = Subject(recipe).open()
    narrow = [name for name in dict.fromkeys([precision, "fp16"]) if name in ("bf16", "fp16")]
    return [survival(case, format_name=name) for name in narrow]


_LOOKS: dict[str, Callable[[str, str], object]] = {"estimate": _estimate, "audit": _audit, "survival": _survival}
