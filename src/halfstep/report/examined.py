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
from halfstep.json_data import convert_to_json_data
from halfstep.report.json_fields import coerce_mapping
from halfstep.train.run_folder import find_recipe_file

if TYPE_CHECKING:
    from halfstep.measure.audit.page import Audit
    from halfstep.measure.survival_report import Survival

EXAMINED = "examined.json"
FORMAT = 1
PARTS = ("estimate", "audit", "survival")


def read_examination(run: Path) -> dict[str, Any]:
    """Return the findings about the model of this run's current recipe; empty if there are none."""
    found = coerce_mapping(read_json(run / EXAMINED))
    if found.get("format") != FORMAT or found.get("recipe") != _hash_recipe(run):
        return {}
    return {part: found[part] for part in (*PARTS, "failed") if part in found}


def examine_run_model(run: Path, precision: str, on_progress: Callable[[int, int], None]) -> None:
    """Build the model of a run's recipe, find formats, headroom, memory and survival, and keep them in its folder.

    A part that fails is left out, with the reason under `failed`: a task of the user's own needs its file.
    """
    failed: dict[str, str] = {}
    found = {"format": FORMAT, "recipe": _hash_recipe(run), "precision": precision, "failed": failed}
    for done, (part, look) in enumerate(_LOOKS.items()):
        on_progress(done, len(_LOOKS))
        try:
            found[part] = look(str(find_recipe_file(run)), precision)
        except HalfstepError as error:
            failed[part] = error.given
    write_json(run / EXAMINED, convert_to_json_data(found))


def _hash_recipe(run: Path) -> str:
    return hashlib.sha256(find_recipe_file(run).read_bytes()).hexdigest()


def _estimate_memory(recipe: str, precision: str) -> object:
    from halfstep.measure.memory.report import EstimateOptions, build_estimate_report
    from halfstep.measure.subject import Subject

    return convert_to_json_data(
        build_estimate_report(Subject(recipe).open, EstimateOptions(precisions=("fp32", precision)))
    )


def _audit_model(recipe: str, precision: str) -> Audit:
    from halfstep.measure.audit.audit import audit
    from halfstep.measure.subject import Subject

    return audit(Subject(recipe), precision=precision)


def _test_survival(recipe: str, precision: str) -> list[Survival]:
    from halfstep.measure.subject import Subject
    from halfstep.measure.survival import survival

    case = Subject(recipe).open()
    narrow = [name for name in dict.fromkeys([precision, "fp16"]) if name in ("bf16", "fp16")]
    return [survival(case, format_name=name) for name in narrow]


_LOOKS: dict[str, Callable[[str, str], object]] = {
    "estimate": _estimate_memory,
    "audit": _audit_model,
    "survival": _test_survival,
}
