"""The whole check of settings: read every source, judge them together, and say how things stand. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.doctor.accelerate_file import from_accelerate
from halfstep.doctor.conflicts import Verdict, judge
from halfstep.doctor.environment import from_environment
from halfstep.doctor.facts import default_file_note, facts
from halfstep.doctor.settings import Setting, Source, shown
from halfstep.doctor.sources import CLIPPING, LEARNING_RATE, from_deepspeed, from_recipe
from halfstep.precision.names import AUTO

_FULL = ("fp32", "tf32")


def check_settings(
    recipe: str | None = None,
    *,
    accelerate: str | None = None,
    deepspeed: str | None = None,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Every precision setting with its source, what contradicts what, and the status, as plain data."""
    readers = ((from_recipe, recipe), (from_accelerate, accelerate), (from_deepspeed, deepspeed))
    sources = [read(place) for read, place in readers if place is not None] + [from_environment(variables)]
    settings = [setting for source in sources for setting in source.precision]
    verdict = judge(settings)
    findings = [conflict.finding for conflict in verdict.conflicts] + facts(sources)
    findings += default_file_note(variables) if accelerate is None else []
    return {
        "sources": [{"kind": s.kind, "place": s.place} for s in sources if s.kind != "environment" or s.precision],
        "settings": [setting.as_dict() for setting in settings],
        "conflicts": [conflict.as_dict() for conflict in verdict.conflicts],
        "findings": [finding.as_dict() for finding in findings],
        "status": _status(sources, settings, verdict),
    }


def _status(sources: Sequence[Source], settings: Sequence[Setting], verdict: Verdict) -> dict[str, Any]:
    return {
        "aligned": not verdict.conflicts,
        "precision": None if verdict.conflicts else verdict.precision,
        "amp": _amp(settings, verdict),
        "fp16": _fp16(settings, verdict),
        "learning_rate": _found(sources, LEARNING_RATE),
        "clipping": _found(sources, CLIPPING),
    }


def _amp(settings: Sequence[Setting], verdict: Verdict) -> str:
    if verdict.conflicts:
        sides = {s.where: str(s) for c in verdict.conflicts for s in (c.one, c.other)}
        return f"disputed ({' against '.join(sides.values())})"
    if verdict.precision is None:
        return "not set"
    if verdict.precision == AUTO:
        return "the device decides"
    if verdict.precision in _FULL:
        return f"disabled (computes in {verdict.precision})"
    named = any(s.claim and s.claim.says and s.claim.meaning == verdict.precision for s in settings)
    return f"enabled (in {verdict.precision}{'' if named else ', which no setting names'})"


def _fp16(settings: Sequence[Setting], verdict: Verdict) -> str:
    own = next((s for s in settings if s.leaf == "fp16" or s.key == "fp16.enabled"), None)
    if verdict.conflicts:
        return f"disputed ({own})" if any(own in (c.one, c.other) for c in verdict.conflicts) else _as_written(own)
    if verdict.precision == "fp16":
        return "enabled"
    if verdict.precision in (None, AUTO):
        return _as_written(own)
    return f"disabled (the format is {verdict.precision})"


def _as_written(setting: Setting | None) -> str:
    return f"as written ({setting})" if setting else "not set"


def _found(sources: Iterable[Source], keys: frozenset[str]) -> str:
    found = [s for source in sources for s in source.training if s.leaf in keys]
    return "; ".join(f"{shown(s.value)} ({s.key}, {s.where})" for s in found) or "not set"
