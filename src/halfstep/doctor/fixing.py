"""Make settings agree: one plan of edits, checked in memory before a file is written. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.doctor.checkup import SettingsVerdict, compare_precision_settings, read_sources
from halfstep.doctor.linking import ProjectRun
from halfstep.doctor.located import Edit, LocatedFinding
from halfstep.doctor.patch import apply_text_edits, collect_edits, write_texts
from halfstep.doctor.project import Project
from halfstep.doctor.project_check import (
    collect_precisions,
    examine_project,
    is_settings_finding,
    list_runtime_settings,
)
from halfstep.doctor.repairs import build_agreeing_edits, build_setting_edits, format_setting_line
from halfstep.doctor.settings import FoundSetting
from halfstep.doctor.sources import NOT_GIVEN
from halfstep.errors import WrongUse
from halfstep.precision.names import AUTO, list_precision_names, parse_precision
from halfstep.recipe.sources import is_recipe_path, read_recipe_text

_MOST = 20
"""The most passes of edits; an edit may activate a setting that another pass then changes."""


def parse_fix_precision(name: str) -> str:
    """Return the precision that --fix NAME names; raise `WrongUse` for a word that is no precision of a run."""
    wanted = parse_precision(name).name
    if wanted not in list_precision_names():
        raise WrongUse(f"--fix {name}", allowed=", ".join(list_precision_names()), do="--fix bf16")
    return wanted


@dataclass(frozen=True)
class FixPlan:
    """What --fix would write: the new text of each file, after which no setting conflicts."""

    project: Project
    """The project as it is."""
    texts: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    """Why the settings are left as they are; mistakes in code are fixed all the same."""


def plan_fixes(folder: str, precision: str | None = None, variables: Mapping[str, str] = os.environ) -> FixPlan:
    """Return the edits of all findings as one plan, or those after which every setting asks for `precision`.

    Every pass is checked in memory. Without a precision, settings are left alone where the plan does not end aligned;
    with one, that raises `WrongUse`. Python is edited for mistakes in code only.
    """
    before = examine_project(folder, variables)
    if precision is not None:
        return FixPlan(before[0], _plan_precision(folder, precision, variables))
    refused = _find_open_conflict(before[2])
    texts = {} if refused else _run_fix_passes(folder, variables, code_only=False)
    if texts and (left := _find_open_conflict(examine_project(folder, variables, texts)[2], edited_too=True)):
        refused, texts = left, {}
    return FixPlan(before[0], texts if not refused else _run_fix_passes(folder, variables, code_only=True), refused)


def _run_fix_passes(folder: str, variables: Mapping[str, str], code_only: bool) -> dict[str, str]:
    texts: dict[str, str] = {}
    for _ in range(_MOST):
        project, _, findings = examine_project(folder, variables, texts)
        edits = collect_edits(f for f in findings if not code_only or not is_settings_finding(f))
        if not edits:
            break
        texts |= apply_text_edits(project.texts, edits)
    return texts


def _find_open_conflict(findings: Sequence[LocatedFinding], edited_too: bool = False) -> str:
    """Return the evidence of an error about settings that no edit removes; empty if there is none."""
    errors = [f for f in findings if f.severity == "error" and is_settings_finding(f) and not f.in_tests]
    left = next((f for f in errors if edited_too or not f.edits), None)
    return f"{left.where}: {left.id}: {left.evidence}" if left else ""


def _plan_precision(folder: str, wanted: str, variables: Mapping[str, str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for _ in range(_MOST):
        project, runs, findings = examine_project(folder, variables, texts)
        # The edits after which every setting of every run asks for `wanted`.
        said = [s for run in runs for s in run.settings() if s.claim and s.value != NOT_GIVEN]
        edits = list(build_agreeing_edits(_list_opposing_settings(runs, wanted), wanted, said, project.texts))
        edits = edits or collect_edits(f for f in findings if is_settings_finding(f) and f.severity == "error")
        if not edits:
            break
        texts |= apply_text_edits(project.texts, edits)
    project, runs, findings = examine_project(folder, variables, texts)
    against = _list_opposing_settings(runs, wanted)
    if against:
        raise _manual_edit_error(against[0], wanted)
    if computed := list_runtime_settings(runs, wanted):
        raise _runtime_value_error(computed[0], wanted)
    if left := _find_open_conflict(findings, edited_too=True):
        raise WrongUse(
            f"--fix {wanted} does not end in settings that agree: {left}"[:400],
            allowed="settings that can be changed outside of Python",
            do="halfstep doctor without --fix says what to write",
        )
    if collect_precisions(runs) - {wanted, AUTO}:
        raise WrongUse(
            f"--fix {wanted}, after which runs differ: {', '.join(sorted(collect_precisions(runs)))}",
            allowed="settings that can be changed outside of Python",
            do="halfstep doctor without --fix names them",
        )
    return texts


def _list_opposing_settings(runs: Sequence[ProjectRun], wanted: str) -> list[FoundSetting]:
    said = [s for run in runs for s in run.settings() if s.claim and s.value != NOT_GIVEN and s.decides]
    return [setting for setting in said if _is_opposing_setting(setting, wanted)]


def _is_opposing_setting(setting: FoundSetting, wanted: str) -> bool:
    assert setting.claim
    named = setting.claim.says is not None and setting.claim.meaning not in (wanted, AUTO)
    return named or wanted in setting.claim.denies


def make_settings_agree(
    precision: str,
    recipe: str | None = None,
    *,
    accelerate: str | None = None,
    deepspeed: str | None = None,
    variables: Mapping[str, str] = os.environ,
) -> list[Edit]:
    """Change every line that conflicts with `precision`, all of them or none.

    Raise `WrongUse` if a setting cannot be changed automatically.
    """
    wanted = parse_fix_precision(precision)
    given = [path for path in (recipe, accelerate, deepspeed) if path is not None]
    before = {
        path: read_recipe_text(path if path == recipe or is_recipe_path(path) else f"./{path}")[1] for path in given
    }
    texts, changes = dict(before), []  # type: dict[str, str], list[Edit]
    for _ in range(_MOST):
        sources = read_sources(recipe, accelerate, deepspeed, variables, texts)
        settings = [setting for source in sources for setting in source.precision]
        verdict = compare_precision_settings(settings)
        if not verdict.conflicts:
            _check_precision(verdict, wanted)
            write_texts(Path(), before, {file: text for file, text in texts.items() if text != before[file]})
            return changes
        conflict = verdict.conflicts[0]
        # Where neither of the two asks for it, one after the other.
        setting = conflict.other if conflict.ways[0].precision == wanted else conflict.one
        is_own = setting.place in texts and (setting.place != recipe or is_recipe_path(setting.place))
        edits = build_setting_edits(setting, wanted, settings, texts) if is_own else ()
        if not edits:
            raise _manual_edit_error(setting, wanted)
        changes += edits
        texts |= apply_text_edits(texts, edits)
    raise WrongUse(
        f"settings that still contradict each other after {_MOST} changes",
        allowed="files whose settings can be made to agree",
        do="halfstep doctor without --fix names them",
    )


def _check_precision(verdict: SettingsVerdict, wanted: str) -> None:
    if verdict.precision not in (wanted, AUTO):
        raise WrongUse(
            f"--fix {wanted}, but no settings conflict, and all of them request {verdict.precision or 'nothing'}",
            allowed="--fix settles contradictions",
            do=f"--fix {verdict.precision or 'bf16'}, or write {wanted} at the place that the page names",
        )


def _runtime_value_error(setting: FoundSetting, wanted: str) -> WrongUse:
    return WrongUse(
        f"--fix {wanted}, but {setting} ({setting.where}) decides at run time, regardless of what the files say",
        allowed="a project whose files decide; edit Python code yourself",
        do=f"write there: {format_setting_line(setting, wanted)}",
    )


def _manual_edit_error(setting: FoundSetting, wanted: str) -> WrongUse:
    return WrongUse(
        f"--fix {wanted} cannot change {setting} ({setting.where})",
        allowed="settings in your configurations and launch lines; edit Python code yourself",
        do=f"write there: {format_setting_line(setting, wanted)}",
    )
