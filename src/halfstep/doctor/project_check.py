"""Check a whole project: effective, ignored and contradictory settings per run, and one verdict. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from halfstep.doctor.checkup import (
    SettingsVerdict,
    build_precision_status,
    compare_precision_settings,
    list_settings_findings,
    note_default_file,
)
from halfstep.doctor.linking import ProjectRun, link_project_runs
from halfstep.doctor.located import Edit, LocatedFinding, split_lines
from halfstep.doctor.precedence import ACCELERATE, Provenance
from halfstep.doctor.project import Project, read_project
from halfstep.doctor.project_page import SEVERAL, FileCounts, ProjectReport, ProjectStatus, RunReport
from halfstep.doctor.repairs import build_setting_edits, format_setting_line
from halfstep.doctor.settings import UNRESOLVED, FoundSetting, SettingSource
from halfstep.doctor.settings_page import Conflict
from halfstep.doctor.sources import NOT_GIVEN, from_environment
from halfstep.doctor.sources.reading import LIGHTNING_TRUE
from halfstep.finding import Finding, Severity
from halfstep.numbers import format_counted_noun
from halfstep.precision.names import AUTO, list_precision_names

_SAID_BY_THE_TABLE = frozenset({"accelerate.order", "recipe.not_accelerate"})
"""Notes for a single file; the table of a project says the same, for this project."""
_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}


def check_project(folder: str, variables: Mapping[str, str] = os.environ) -> ProjectReport:
    """Return the report on a folder as plain data: files, settings, who wins, findings, and the status.

    Raise `WrongUse` if there is no such folder.
    """
    return build_project_report(*examine_project(folder, variables))


def examine_project(
    folder: str, variables: Mapping[str, str] = os.environ, changed: Mapping[str, str] | None = None
) -> tuple[Project, list[ProjectRun], list[LocatedFinding]]:
    """Return the content of a folder, its runs, and all findings; raise `WrongUse` if there is no such folder.

    The texts of `changed` replace those of files.
    """
    project = read_project(folder, changed)
    runs = link_project_runs(project, from_environment(variables))
    read = [f for f in project.findings if f.id not in _UNREAD]
    found = [*read, *_note_unread_files(project), *_note_unknown_words(project), *_note_own_words(project)]
    found += [f for run in runs for f in _check_run(project, run)]
    for run in runs:
        # `accelerate launch` reads the file in its own place then, which is outside of the project.
        has_no_file = run.start == ACCELERATE and not any(source.kind == "accelerate" for source in run.sources)
        notes = note_default_file(variables) if run.launch is not None and has_no_file else []
        fix = "name the file that is meant: accelerate launch --config_file FILE"
        found += [replace(_locate_finding(note, run), fix=fix) for note in notes]
    unique = {(f.id, f.file, f.line, f.evidence): f for f in found}
    return project, runs, sorted(unique.values(), key=lambda f: (_ORDER[f.severity], f.file, f.line or 0, f.id))


def build_project_report(
    project: Project, runs: Sequence[ProjectRun], findings: Sequence[LocatedFinding]
) -> ProjectReport:
    """Return the report of a folder."""
    settings = {(s.place, s.line, s.key): s for source in project.sources for s in source.precision}
    settings |= {(s.place, s.line, s.key): s for launch in project.launches for s in launch.source.precision}
    settings |= {(s.place, s.line, s.key): s for run in runs for source in run.sources for s in source.precision}
    status = build_project_status(runs, findings)
    if not project.files:
        status = replace(status, final="nothing to check: the folder has no script and no configuration")
    return ProjectReport(
        project.root,
        FileCounts(project.files, len({place for place, _, _ in settings}), project.more),
        list(settings.values()),
        [_build_run_report(run) for run in runs],
        list(findings),
        status,
    )


def _build_run_report(run: ProjectRun) -> RunReport:
    files = list(dict.fromkeys(source.place for source in run.sources if source.precision))
    provenance = list(run.provenance())
    precision = _resolve_run_precision(run, run.provenance()).precision
    return RunReport(run.name, run.launch is not None, run.start, files, precision, provenance)


_UNREAD = frozenset({"project.not_read", "code.unread"})
_MOST_NAMED = 5
"""Places that one note names."""


def is_settings_finding(finding: LocatedFinding) -> bool:
    """Return whether a finding is about settings, not about code."""
    return not finding.id.startswith("code.")


def _note_unread_files(project: Project) -> Iterator[LocatedFinding]:
    """Yield one note on all files that were not read."""
    unread = [finding for finding in project.findings if finding.id in _UNREAD]
    if unread:
        named = [f"{f.where}: {f.evidence.removeprefix(f.file).lstrip(':, ')}" for f in unread[:_MOST_NAMED]]
        more = [f"and {len(unread) - _MOST_NAMED} more: see --json"] if len(unread) > _MOST_NAMED else []
        count = "1 file was" if len(unread) == 1 else f"{len(unread)} files were"
        first = unread[0]
        evidence = "\n".join([f"{count} not read", *named, *more])
        yield LocatedFinding("project.not_read", "note", evidence, first.fix, first.file, first.line)


def _iterate_sources(project: Project) -> Iterator[SettingSource]:
    yield from project.sources
    yield from (launch.source for launch in project.launches)


def _note_unknown_words(project: Project) -> Iterator[LocatedFinding]:
    for source in _iterate_sources(project):
        for setting in source.precision:
            if setting.status == "unknown":
                evidence = f"{setting}  ({setting.where}): {setting.means}"
                fix = f"write one of its words, such as {format_setting_line(setting, 'bf16')}"
                yield LocatedFinding("settings.unreadable", "error", evidence, fix, setting.place, setting.line)


_OTHERS_WORDS = frozenset(
    {"amp", "amp_bf16", "amp_fp16", "amp_fp8", "amp_bfloat16", "pure_bf16", "pure_fp16", "bf16-true", "16-true"}
    | {"64-true", "64", "fp64", "float64", "double", "int8", "int4", "apex", "native", "full", "true", "false", "none"}
    | {"transformer-engine", "transformer-engine-float16", "o0", "o1", "o2", "o3", "mixed", "single", "tf32", "highest"}
    | {"high", "medium", "low", "default", "pure", "o4"}
)
"""Words of Composer, litgpt, apex and others, in small letters."""


def _note_own_words(project: Project) -> Iterator[LocatedFinding]:
    """Yield one note on the words that are neither the project's own, as its code defines them, nor known."""
    known = {word.lower() for source in project.sources for word in source.words} | _OTHERS_WORDS
    found = [
        setting for source in _iterate_sources(project) for setting in source.precision
        if setting.status == "own" and str(setting.value).strip().lower() not in known
    ]  # fmt: skip
    if found:
        named = [f"{setting}  ({setting.where})" for setting in found[:_MOST_NAMED]]
        more = [f"and {len(found) - _MOST_NAMED} more: see --json"] if len(found) > _MOST_NAMED else []
        evidence = "\n".join(["only the project's own code knows what this means", *named, *more])
        yield LocatedFinding("settings.own_word", "note", evidence, "", found[0].place, found[0].line)


def _check_run(project: Project, run: ProjectRun) -> Iterator[LocatedFinding]:
    rows = run.provenance()
    conflicts = _resolve_run_precision(run, rows).conflicts
    # Nothing says which of two formats is meant: nothing that follows from either is edited.
    is_open = any(conflict.is_deepspeed for conflict in conflicts)
    for row in rows:
        for loser in row.disagreeing():
            if not row.deliberate(loser):
                found = _build_ignored_finding(project, run, row, loser)
                yield _drop_edits(found) if is_open else found
    settings = run.settings()
    for conflict in conflicts:
        yield _build_mismatch_finding(project, conflict, settings)
    for finding in list_settings_findings(run.sources):
        if finding.id not in _SAID_BY_THE_TABLE:
            yield _drop_edits(_locate_finding(finding, run)) if is_open else _locate_finding(finding, run)
    for check in _SUBSTITUTIONS:
        yield from check(settings)


def _drop_edits(finding: LocatedFinding) -> LocatedFinding:
    return replace(finding, edits=())


def _resolve_run_precision(run: ProjectRun, rows: Sequence[Provenance]) -> SettingsVerdict:
    """Return the precision of a run, and the conflicts between settings that are known to belong together."""
    # The settings that must agree: those that win in their tool, and those that no tool ranks.
    # Without a winner the settings that were read say what everybody believes: `fp16: false` and `bf16: false`.
    lost = [setting for row in rows for setting in (*(row.overrode if row.winners else ()), *row.unread)]
    compared = [setting for setting in run.settings() if setting not in lost]
    found = compare_precision_settings([setting for setting in compared if setting.decides])
    if found.precision is None:
        # What the project's own flags say is shown, and compared with nothing.
        return SettingsVerdict(compare_precision_settings(compared).precision, [])
    certain = [one for one in found.conflicts if not _is_composition(one) and _is_known(one)]
    is_open = bool(found.conflicts) and not certain and not all(map(_is_composition, found.conflicts))
    return SettingsVerdict(None if is_open else found.precision, certain)


def _is_known(conflict: Conflict) -> bool:
    """Return whether a program whose words are known reads one of the two, or torch itself does.

    How two settings of the project's own code go together, that code alone knows.
    """
    one, other = conflict.one, conflict.other
    return any(setting.is_judged or setting.owner == "torch" for setting in (one, other))


def _is_composition(conflict: Conflict) -> bool:
    """Return whether one file of Hydra replaces what another says, which is what they are for."""
    return conflict.one.kind == conflict.other.kind == "hydra" and conflict.one.place != conflict.other.place


def _build_ignored_finding(project: Project, run: ProjectRun, row: Provenance, loser: FoundSetting) -> LocatedFinding:
    by = row.winners[0] if row.winners else None
    if row.refuses:
        why = f"{row.tool} stops with an error, because {by} ({by.where if by else ''}) says something else"
    elif by is None:
        why = f"nothing that {_name_starter(run)} reads names a precision: {row.tool} runs in fp32"
    else:
        why = f"{by}  ({by.where}) wins in {row.tool}, which runs in {row.precision}"
    if any(loser in source.precision for source in run.aside) and run.start == ACCELERATE:
        why = f"accelerate launch reads the file that --config_file names, or the default in its own place; {why}"
    elif loser in row.unread:
        why = f"{_name_starter(run)} does not read it; {why}"
    evidence = f"{loser}  ({loser.where}) is {'refused' if row.refuses else 'ignored'} in {run.name}\n{why}"
    edits, fix = _suggest_repair(project, run, row, loser)
    return LocatedFinding("settings.ignored", "error", evidence, fix, loser.place, loser.line, edits)


def _name_starter(run: ProjectRun) -> str:
    if run.launch and run.launch.launcher not in ("accelerate", "fabric"):
        return run.launch.launcher
    return {"accelerate": "accelerate launch", "fabric": "fabric run"}.get(run.start, "python")


def _suggest_repair(
    project: Project, run: ProjectRun, row: Provenance, loser: FoundSetting
) -> tuple[tuple[Edit, ...], str]:
    """Return the edits that remove an ignored setting's contradiction, and the sentence that says what to write."""
    aside = any(loser in source.precision for source in run.aside)
    if aside and run.launch and run.start == ACCELERATE:
        return _suggest_config_file(project, run, loser)
    edits = build_setting_edits(loser, row.precision, run.settings(), project.texts)
    fix = f"to keep {row.precision}, write in {loser.where}:\n    {format_setting_line(loser, row.precision)}"
    return edits, fix + _suggest_other_way(row, loser)


def _suggest_other_way(row: Provenance, loser: FoundSetting) -> str:
    """Return what to write where the setting that is ignored should decide."""
    asked = loser.claim.meaning if loser.claim else ""
    if not row.winners or asked not in list_precision_names():
        return ""
    winner = row.winners[0]
    if winner.kind == "code" and winner.argument:
        return f"\nor: to run in {asked}, give the script --{winner.argument}, whose default wins here"
    return f"\nor: to run in {asked}, write in {winner.where}:\n    {format_setting_line(winner, asked)}"


def _suggest_config_file(project: Project, run: ProjectRun, loser: FoundSetting) -> tuple[tuple[Edit, ...], str]:
    assert run.launch
    place, number = run.launch.source.place, run.launch.line
    before = split_lines(project.texts[place])[number - 1].rstrip("\r\n")
    after = before.replace("accelerate launch", f"accelerate launch --config_file {loser.place}", 1)
    fix = f"name it: accelerate launch --config_file {loser.place}"
    return ((Edit(place, number, before, after),) if after != before else ()), fix


def _build_mismatch_finding(project: Project, conflict: Conflict, settings: Sequence[FoundSetting]) -> LocatedFinding:
    finding, other = conflict.finding, conflict.other
    # Both formats in one file, or in DeepSpeed's and accelerate's: nothing says which of the two was meant.
    open_choice = conflict.one.place == other.place or conflict.is_deepspeed
    edits = () if open_choice else build_setting_edits(other, conflict.ways[0].precision, settings, project.texts)
    line = other.line
    return LocatedFinding(finding.id, finding.severity, finding.evidence, finding.fix, other.place, line, edits)


def _locate_finding(finding: Finding, run: ProjectRun) -> LocatedFinding:
    if isinstance(finding, LocatedFinding):
        return finding
    return LocatedFinding(finding.id, finding.severity, finding.evidence, finding.fix, run.name.partition(":")[0])


def _build_setting_finding(
    setting: FoundSetting, name: str, severity: Severity, evidence: str, fix: str
) -> LocatedFinding:
    text = f"{setting}  ({setting.where}): {evidence}"
    return LocatedFinding(name, severity, text, fix, setting.place, setting.line)


def _find_lightning_cpu_fp16(settings: Sequence[FoundSetting]) -> Iterator[LocatedFinding]:
    on_cpu = any(s.leaf == "accelerator" and s.value == "cpu" for s in settings)
    for s in settings:
        if on_cpu and s.owner in ("lightning", "lightning cli") and s.claim and s.claim.meaning == "fp16":
            evidence = "with accelerator: cpu Lightning takes bf16-mixed instead"
            yield _build_setting_finding(s, "lightning.fp16_on_cpu", "warning", evidence, "write precision: bf16-mixed")


def _find_narrow_weights(settings: Sequence[FoundSetting]) -> Iterator[LocatedFinding]:
    for s in settings:
        if (
            s.claim
            and str(s.value).strip().lower() in LIGHTNING_TRUE
            and s.owner in ("lightning", "lightning cli", "fabric")
        ):
            evidence = f"{s.means}: an update below their precision is rounded away"
            fix = f"write {s.claim.meaning}-mixed" if s.claim.meaning == "bf16" else "write 16-mixed"
            yield _build_setting_finding(s, "lightning.narrow_weights", "warning", evidence, fix)


def _find_fixed_scale(settings: Sequence[FoundSetting]) -> Iterator[LocatedFinding]:
    for s in settings:
        if s.kind == "deepspeed" and s.leaf == "loss_scale" and s.value not in (0, 0.0, "auto"):
            evidence = "a fixed loss scale: gradients that overflow at it overflow again"
            yield _build_setting_finding(
                s, "deepspeed.fixed_scale", "warning", evidence, 'write "loss_scale": 0, which adapts'
            )


def _find_unused_scaler(settings: Sequence[FoundSetting]) -> Iterator[LocatedFinding]:
    off = {s.place for s in settings if s.kind == "deepspeed" and s.key == "fp16.enabled" and s.value is False}
    for s in settings:
        if s.place in off and s.key == "fp16.initial_scale_power":
            evidence = "fp16 is off, so settings of the loss scale have no effect"
            yield _build_setting_finding(
                s, "deepspeed.scaler_unused", "note", evidence, "nothing, if fp16 is meant to be off"
            )


def _find_hidden_nan(settings: Sequence[FoundSetting]) -> Iterator[LocatedFinding]:
    for s in settings:
        if s.key.rstrip(")").endswith("logging_nan_inf_filter") and s.value is True:
            evidence = "a loss that is inf or NaN does not show in the logs of training and evaluation"
            fix = "write logging_nan_inf_filter: false while you look for one"
            yield _build_setting_finding(s, "transformers.nan_hidden_from_logs", "note", evidence, fix)


_SUBSTITUTIONS = (
    _find_hidden_nan,
    _find_lightning_cpu_fp16,
    _find_narrow_weights,
    _find_fixed_scale,
    _find_unused_scaler,
)


def build_project_status(runs: Sequence[ProjectRun], findings: Iterable[LocatedFinding]) -> ProjectStatus:
    """Return the status check over all runs; where runs differ in precision, each is named."""
    errors = [finding for finding in findings if finding.severity == "error" and not finding.in_tests]
    verdicts = {run.name: _resolve_run_precision(run, run.provenance()) for run in runs}
    sources = list({id(s): s for run in runs for s in run.sources}.values())
    settings = [s for run in runs for s in run.settings() if s.value != NOT_GIVEN]
    precisions = {v.precision for v in verdicts.values() if v.precision not in (None, AUTO)}
    disputed = next((v for v in verdicts.values() if v.conflicts), None)
    one = disputed or SettingsVerdict(next(iter(precisions), None) if len(precisions) < 2 else None, [])
    status = build_precision_status(sources, settings, one)
    if len(precisions) > 1 and not disputed:
        each = "; ".join(f"{v.precision} ({name})" for name, v in verdicts.items() if v.precision)
        status = replace(status, precision=SEVERAL, amp=each, fp16="as above")
    final = status.final
    if errors:
        fix = "--fix shows the patch" if all(finding.edits for finding in errors) else "the fix is below each"
        final = f"not ready: {format_counted_noun(len(errors), 'error')}; {fix}"
    ids = {finding.id for finding in errors}
    known = next((words for name, words in _REASONS.items() if name in ids), "")
    return ProjectStatus(
        **{**vars(status), "aligned": not errors, "final": final},
        unresolved=sum(setting.means == UNRESOLVED for setting in settings),
        reason=known if errors else "",
        errors=len(errors),
        runs=len(runs),
    )


_REASONS = {
    "settings.precision_mismatch": "precision mismatch",
    "deepspeed.format_mismatch": "DeepSpeed and accelerate request different formats",
    "settings.ignored": "a setting is ignored",
    "settings.unreadable": "a setting cannot be read",
}


def collect_precisions(runs: Sequence[ProjectRun]) -> set[str]:
    """Return the precisions of all runs whose settings decide one."""
    found = (_resolve_run_precision(run, run.provenance()).precision for run in runs)
    return {precision for precision in found if precision is not None}
