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
from halfstep.doctor.code.mixed_precision import find_mixed_precision
from halfstep.doctor.linking import FILES_OF_SCRIPTS, ProjectRun, link_project_runs
from halfstep.doctor.located import Edit, LocatedFinding, split_lines
from halfstep.doctor.precedence import ACCELERATE, Provenance
from halfstep.doctor.project import Project, read_project
from halfstep.doctor.project_page import (
    SEVERAL,
    FileCounts,
    ProjectReport,
    ProjectStatus,
    RunReport,
    RuntimeValue,
    describe_project_precision,
)
from halfstep.doctor.repairs import build_setting_edits, format_setting_line
from halfstep.doctor.run_precision import RuntimeDecision, list_runtime_decisions, resolve_run_precision
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
    found += [_build_runtime_finding(one) for one in list_runtime_decisions(runs) if _is_doubtful(one)]
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
    status = _add_code(build_project_status(runs, findings), project)
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


def _add_code(status: ProjectStatus, project: Project) -> ProjectStatus:
    """Return the status with the code that decides the precision, where no setting does."""
    if status.precision is None and not status.disputed and not status.at_run_time:
        found = find_mixed_precision({**project.texts, **project.cells})
        status = replace(status, in_code=found.decisions, casts=found.casts)
    if status.in_code or status.casts or status.at_run_time:
        status = replace(status, amp=describe_project_precision(status))
    return status


def _build_run_report(run: ProjectRun) -> RunReport:
    files = list(dict.fromkeys(source.place for source in run.sources if source.precision))
    provenance = list(run.provenance())
    precision = resolve_run_precision(run, provenance).precision
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
    found = resolve_run_precision(run, rows)
    # Nothing says which of two formats is meant, or the run replaces what is written: nothing that follows from it is
    # edited.
    is_open = any(conflict.is_deepspeed for conflict in found.conflicts) or any(one.beaten for one in found.decisions)
    for row in rows:
        for loser in row.disagreeing():
            if not row.deliberate(loser):
                ignored = _build_ignored_finding(project, run, row, loser)
                yield _drop_edits(ignored) if is_open else ignored
    settings = run.settings()
    for conflict in found.conflicts:
        mismatch = _build_mismatch_finding(project, conflict, settings)
        yield _drop_edits(mismatch) if is_open else mismatch
    yield from (_build_refuted_finding(one) for one in found.decisions if one.refuted)
    for finding in list_settings_findings(run.sources):
        if finding.id not in _SAID_BY_THE_TABLE:
            yield _drop_edits(_locate_finding(finding, run)) if is_open else _locate_finding(finding, run)
    for check in _SUBSTITUTIONS:
        yield from check(settings)


def _is_doubtful(decision: RuntimeDecision) -> bool:
    """Return whether some value of a computed setting is wrong, and some value is right."""
    is_ignored = any(not decision.row.deliberate(loser) for loser in decision.row.disagreeing())
    return bool(decision.beaten) and not decision.refuted and not is_ignored


def _build_refuted_finding(decision: RuntimeDecision) -> LocatedFinding:
    setting = decision.setting
    refuted = sorted(decision.refuted, key=lambda one: (one.place, one.line or 0))
    evidence = "\n".join(f"{s}  ({s.where}): {s.means}" for s in (setting, *refuted))
    evidence += "\nno possible value agrees with the other settings"
    fix = _suggest_certain_value(decision.row, decision.beaten)
    return LocatedFinding("settings.precision_mismatch", "error", evidence, fix, setting.place, setting.line)


def _build_runtime_finding(decision: RuntimeDecision) -> LocatedFinding:
    setting, row = decision.setting, decision.row
    values = f": {' or '.join(row.possible)}" if row.possible else ""
    winners = [f"{winner}  ({winner.where})" for winner in row.winners]
    seen = [f"it is looked up as {s}  ({s.where}), if the run reads that file" for s in decision.candidates]
    beaten = [f"it beats {s}  ({s.where})" for s in decision.beaten]
    evidence = "\n".join([*winners, f"decides in {row.tool} at run time{values}", *seen, *beaten])
    fix = _suggest_certain_value(row, decision.beaten)
    return LocatedFinding("settings.decided_at_run_time", "warning", evidence, fix, setting.place, setting.line)


def _suggest_certain_value(row: Provenance, beaten: Sequence[FoundSetting]) -> str:
    """Return what to write in the place of a computed value."""
    winner = row.winners[0]
    asked = compare_precision_settings(beaten).precision
    target = asked if asked in list_precision_names() else "bf16"
    line = format_setting_line(_add_possible_claim(row), target)
    ways = [f"write the value itself in {winner.where}:\n    {line}"]
    read = [s.place for s in row.overrode if s.claim and s.value != NOT_GIVEN and s.place != winner.place]
    if read and winner.kind != "environment":
        named = "the argument" if winner.kind == "code" else winner.key
        ways.append(f"delete {named}, so that {read[0]} decides")
    own = [s.where for s in beaten if s.kind in FILES_OF_SCRIPTS and s.claim and s.claim.says]
    if own and winner.kind == "code" and not winner.candidates:
        ways.append(f"pass the value of {own[0]}, and keep it in that file only")
    return "\nor: ".join(ways)


def _drop_edits(finding: LocatedFinding) -> LocatedFinding:
    return replace(finding, edits=())


def _build_ignored_finding(project: Project, run: ProjectRun, row: Provenance, loser: FoundSetting) -> LocatedFinding:
    by = row.winners[0] if row.winners else None
    if row.refuses:
        why = f"{row.tool} stops with an error, because {by} ({by.where if by else ''}) says something else"
    elif by is None:
        why = f"nothing that {_name_starter(run)} reads names a precision: {row.tool} runs in fp32"
    else:
        winners = (
            " or ".join(f"{winner}  ({winner.where})" for winner in row.winners)
            if by.is_computed
            else f"{by}  ({by.where})"
        )
        why = f"{winners} wins in {row.tool}, which runs in {' or '.join(row.possible)}"
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
    if row.precision is None:
        return (), _suggest_certain_value(row, [loser])
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
    verdicts = {run.name: resolve_run_precision(run, run.provenance()) for run in runs}
    sources = list({id(s): s for run in runs for s in run.sources}.values())
    settings = [s for run in runs for s in run.settings() if s.value != NOT_GIVEN]
    precisions = {v.precision for v in verdicts.values() if v.precision not in (None, AUTO)}
    disputed = next((v for v in verdicts.values() if v.conflicts), None)
    decisions = list_runtime_decisions(runs)
    is_open = any(not decision.is_settled for decision in decisions)
    agreed = None if len(precisions) > 1 or is_open else next(iter(precisions), None)
    one = SettingsVerdict(disputed.precision, disputed.conflicts) if disputed else SettingsVerdict(agreed, [])
    status = build_precision_status(sources, settings, one)
    if len(precisions) > 1 and not disputed and not is_open:
        each = "; ".join(f"{v.precision} ({name})" for name, v in verdicts.items() if v.precision)
        status = replace(status, precision=SEVERAL, amp=each, fp16="as above")
    values = list(map(_build_runtime_value, decisions))
    beating = [value for value in values if value.beats]
    final = _describe_beating(beating) if beating else status.final
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
        disputed=disputed is not None,
        decided=not beating,
        at_run_time=values,
    )


def _build_runtime_value(decision: RuntimeDecision) -> RuntimeValue:
    setting = decision.setting
    beats = list(dict.fromkeys(s.place for s in decision.beaten))
    looked_up = [f"{s.place}:{s.line}" if s.line else s.place for s in decision.candidates]
    return RuntimeValue(setting.place, setting.line, decision.row.possible, beats, looked_up)


def _describe_beating(values: Sequence[RuntimeValue]) -> str:
    places = list(dict.fromkeys(place for value in values for place in value.beats))
    named = [*places[:_MOST_BEATEN], *([f"{len(places) - _MOST_BEATEN} more"] if len(places) > _MOST_BEATEN else ())]
    beaten = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    others = f" and {format_counted_noun(len(values) - 1, 'more place')}" if len(values) > 1 else ""
    decides, beats = ("decide", "they beat") if others else ("decides", "it beats")
    return f"not decided: {values[0].where}{others} {decides} at run time; {beats} {beaten}"


_MOST_BEATEN = 3
"""Files that the verdict names."""
_REASONS = {
    "settings.precision_mismatch": "precision mismatch",
    "deepspeed.format_mismatch": "DeepSpeed and accelerate request different formats",
    "settings.ignored": "a setting is ignored",
    "settings.unreadable": "a setting cannot be read",
}


def collect_precisions(runs: Sequence[ProjectRun]) -> set[str]:
    """Return the precisions of all runs whose settings decide one."""
    found = (resolve_run_precision(run, run.provenance()).precision for run in runs)
    return {precision for precision in found if precision is not None}


def list_runtime_settings(runs: Sequence[ProjectRun], precision: str) -> list[FoundSetting]:
    """Return the settings that the run computes, and that may decide for another precision than this one."""
    found = list_runtime_decisions(runs)
    return [_add_possible_claim(one.row) for one in found if one.row.possible != [precision]]


def _add_possible_claim(row: Provenance) -> FoundSetting:
    """Return a computed winner with a claim: `fp16=...` can become `bf16=True` where it may be on."""
    return replace(row.winners[0], claim=next((claim for case in row.cases for claim in case if claim.says), None))
