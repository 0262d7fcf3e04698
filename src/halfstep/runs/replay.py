"""`halfstep.replay`: run a failed step again in several precisions, and `halfstep.failed_steps`, which lists them."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, list_generations
from halfstep.errors import BadData, HalfstepError, choose_caller_wording, format_error_reason
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.diagnosis.trials import TrialOutcome, Trials
from halfstep.guard.failed_steps.reading import (
    StoredFailedStep,
    check_failed_steps_folder,
    choose_recorded_precision,
    describe_size_problem,
    find_failed_step,
    list_failed_steps,
    load_attempt,
    load_recorded_model,
    read_failed_step,
    refuse_earlier_format,
    resolve_run_folder,
    suggest_replay,
)
from halfstep.guard.repair.advice import REPAIR, advise_precision, advise_remedy
from halfstep.guard.verdict import Verdict, locate_culprit
from halfstep.journal import events
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from halfstep.journal.text import GAVE_UP
from halfstep.observe.recorder import has_compiled_code
from halfstep.precision.environment import collect_environment
from halfstep.precision.names import parse_precision
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.precision.select import Choice, choose_precision
from halfstep.random_state import use_seeded_generators
from halfstep.recipe.changes import compute_recipe_digest
from halfstep.recipe.schema import AUTO
from halfstep.recipe.sources import read_recipe
from halfstep.runs.finished import load_saved_task
from halfstep.runs.registry import resolve_own_task
from halfstep.runs.replay_page import FailedStepList, ListedStep, RecordedStep, ReplayReport, Rerun
from halfstep.status_line import OnProgress
from halfstep.step.experiment.rerun import ReplayConfig
from halfstep.step.report import GRADIENT_NOT_FINITE, LOSS_NOT_FINITE, parse_guard_name
from halfstep.step.step_inputs import StepInputs
from halfstep.terminal import display_progress
from halfstep.train.environment import list_environment_changes
from halfstep.train.give_up import build_launcher_words, read_recipe_lr, suggest_lower_lr
from halfstep.train.process_group import resolve_device
from halfstep.train.run_folder import RECIPE, find_recipe_file, is_finished
from halfstep.train.setup import compile_in_place, make_model, remove_initial_weights
from halfstep.train.task import Task

_SEED = 0


def replay(
    run: str | os.PathLike[str],
    *,
    attempt: int | None = None,
    precision: str | None = None,
    task: type[Task] | str | os.PathLike[str] | None = None,
) -> ReplayReport:
    """Run a failed step of a run again: the origin of its non-finite values, whether precision caused it, and the fix.

    Args:
        run: The folder of a run, or of one failed step of it.
        attempt: Which failed step; by default the newest intact one.
        precision: The precision of the replay. Default: the step's.
        task: The class of a task of your own, or its file.

    Returns:
        The verdict, the step in several precisions, and the command that fixes the run. After Ctrl-C, the results so
        far.

    Raises:
        BadData: The folder holds no run, the run recorded no failed step, or the step's record is damaged.
    """
    folder, found = _find_recorded(Path(os.path.expanduser(run)))
    if not found:
        raise BadData(
            f"{folder} has no recorded failed step",
            allowed="a run whose guard diagnosed a step",
            do=choose_caller_wording(f"halfstep replay {folder} --list", f'halfstep.failed_steps("{folder}") says why'),
        )
    asked = parse_precision(precision).name if precision else None
    record = read_failed_step(_choose_step(folder, found, attempt))
    own = None if task is None else resolve_own_task(task)
    # The record has the states of torch's generators. Python's and NumPy's are the same in every replay.
    with use_seeded_generators(_SEED):
        replayed = load_recorded_step(record, precision=asked, own=own)
        findings = _ReplayFindings()
        try:
            with display_progress("replaying", "reruns") as on_progress:
                _rerun_all(replayed, findings, on_progress)
            findings.do, findings.command = _suggest_replay_remedy(findings.verdict, replayed, folder, task)
        except KeyboardInterrupt:
            findings.interrupted = True
    return ReplayReport(
        run=folder,
        recorded=_describe_step(record),
        precision=replayed.choice.precision.name,
        device=replayed.choice.device.name,
        verdict=findings.verdict,
        same_culprit=findings.same_culprit,
        reruns=tuple(findings.reruns),
        notes=replayed.notes,
        do=findings.do,
        command=findings.command,
        interrupted=findings.interrupted,
    )


def failed_steps(run: str | os.PathLike[str]) -> FailedStepList:
    """List the failed steps that a run recorded, oldest first; nothing is run.

    Args:
        run: The folder of a run, or of one failed step of it.

    Raises:
        BadData: The folder holds no run.
    """
    folder, found = _find_recorded(Path(os.path.expanduser(run)))
    rows = []
    for place in found:
        record = _read_record_problem(place)
        known = (None, record) if isinstance(record, str) else (_describe_step(record), "")
        rows.append(ListedStep(place.path, place.attempt, *known))
    section = read_recipe(str(folder / RECIPE)).raw.get("guard")
    mode = section.get("mode") if isinstance(section, dict) else section
    return FailedStepList(folder, str(mode or "watch"), tuple(rows))


@dataclass
class _ReplayFindings:
    """What a replay has found so far; an interrupt keeps it."""

    reruns: list[Rerun] = field(default_factory=list)
    verdict: Verdict | None = None
    same_culprit: bool | None = None
    do: str = ""
    command: str = ""
    interrupted: bool = False


def _find_recorded(folder: Path) -> tuple[Path, list[CheckpointDir]]:
    """Return the run's folder and its failed steps; for the folder of one failed step, only that one."""
    refuse_earlier_format(folder)
    # A user may point at one failed step instead of its run.
    if (only := find_failed_step(folder)) is not None:
        return find_recipe_file(resolve_run_folder(folder)).parent, [only]
    run = find_recipe_file(folder).parent
    try:
        check_failed_steps_folder(run)
    except OSError as error:
        raise BadData(
            str(error),
            allowed="the folder that the run made",
            do="move it away: the next step that fails makes a folder",
        ) from None
    return folder, list_failed_steps(run)


def _choose_step(run: Path, found: list[CheckpointDir], attempt: int | None) -> CheckpointDir:
    if attempt is None:
        # If none is intact, opening the newest reports the problem.
        records = ((place, _read_record_problem(place)) for place in reversed(found))
        whole = (place for place, record in records if not isinstance(record, str) and not record.step.without)
        return next(whole, found[-1])
    for place in reversed(found):
        if place.attempt == attempt:
            return place
    raise BadData(
        f"attempt {attempt:,} of {run} was not recorded",
        allowed=", ".join(str(place.attempt) for place in found),
        do=suggest_replay(run, found[-1].attempt),
    )


def _read_record_problem(place: CheckpointDir) -> StoredFailedStep | str:
    """Return the record, or its problem as far as that shows without reading its tensors."""
    try:
        record = read_failed_step(place)
        return describe_size_problem(record) or record
    except HalfstepError as error:
        return format_error_reason(error)


@dataclass(frozen=True)
class ReplayableStep:
    """A failed step that can be run again."""

    record: StoredFailedStep
    recipe: Any
    model: nn.Module
    choice: Choice
    attempts: tuple[Callable[[], StepInputs], ...]
    """One loader per rank; attempts are loaded one at a time, because each may be large."""
    notes: tuple[str, ...]
    """Reasons why the result may differ from the original step."""


def load_recorded_step(record: StoredFailedStep, *, precision: str | None, own: type[Task] | None) -> ReplayableStep:
    """Load the step of `record`, in its own precision or another.

    Raise `BadData` if the record has no tensors.
    """
    step = record.step
    if step.without:
        raise BadData(
            f"attempt {step.report.attempt:,} was recorded without its tensors: {step.without}",
            allowed="a step with recorded weights and batch",
            do=f"read the run's report of it: {choose_caller_wording('add --list', 'halfstep.failed_steps(RUN)')}",
        )
    run = resolve_run_folder(record.path)
    task = load_saved_task(run, own)
    recipe = task.recipe
    device = _choose_replay_device(recipe.train.device)
    task.recipe = remove_initial_weights(recipe)
    # The record holds the weights of the failed step; pretrained ones are not fetched for it.
    model, _ = make_model(task, task.recipe, device)
    compile_in_place(model, task.recipe)
    load_recorded_model(record, model)
    choice = (
        choose_precision(precision, device=device) if precision else choose_recorded_precision(step.precision, device)
    )
    choice.precision.prepare(model.train(), device)
    loss = functools.partial(_compute_task_loss, task)
    attempts = tuple(functools.partial(load_attempt, record, rank, loss, device) for rank in range(record.ranks))
    return ReplayableStep(
        record, recipe, model, choice, attempts, tuple(_list_replay_notes(record, run, device, choice, precision))
    )


def _compute_task_loss(task: Task, model: nn.Module, batch: Any) -> Any:
    return task.loss(model, batch, None)


def _choose_replay_device(name: str) -> torch.device:
    """Return the run's device, or the best one here: a step that failed on a cluster is often replayed on a
    workstation.
    """
    try:
        return resolve_device(name)
    except HalfstepError:
        # The device of the run does not exist here.
        return resolve_device(AUTO)


def _list_replay_notes(
    record: StoredFailedStep, run: Path, device: torch.device, choice: Choice, asked: str | None
) -> list[str]:
    step = record.step
    notes = list_environment_changes(record.manifest.environment, collect_environment(device))
    if step.recipe != compute_recipe_digest(run / RECIPE):
        notes.append(f"{RECIPE} was changed since")
    if step.batch_changed:
        notes.append("the batch was modified during the step, so the recorded batch differs from the original one")
    if choice.precision.name != (asked or step.precision):
        notes.append(f"{asked or step.precision} was requested, but this device supports {choice.precision.name}")
    if record.ranks > 1:
        notes.append(f"gradients of {record.ranks} processes are not summed here; each one's step is run alone")
    return notes


ALSO = ("fp32", "bf16")
"""Precisions a failed step is tried in besides its own."""
ROUNDS = len(ALSO) + 3
"""Its own precision, those above, the diagnosis, and an island."""


def _describe_step(record: StoredFailedStep) -> RecordedStep:
    """Return what the run recorded about the step."""
    step, report = record.step, record.step.report
    figures = (report.attempt, report.step, report.reason, report.loss, report.grad_norm, report.loss_scale)
    device = record.manifest.environment.get("device")
    return RecordedStep(*figures, step.precision, tuple(step.islands), device, step.verdict, step.without)


def _rerun_all(replayed: ReplayableStep, findings: _ReplayFindings, on_progress: OnProgress) -> None:
    """Run the step in several ways and fill in `findings`; without a verdict, the step is finite here."""
    rounds = _RerunRounds(findings.reruns, on_progress)
    recorded, precision = replayed.record.step, replayed.choice.precision
    attempt, first = _find_failing_attempt(replayed, rounds)
    ways = [name for name in dict.fromkeys((recorded.precision, *ALSO)) if name != precision.name]
    for name in ways[: len(ALSO)]:
        rounds.note(name, _try_replay(replayed, attempt, resolve_precision_name(name)), resolve_precision_name(name))
    verdict = _diagnose_replay(replayed, attempt, first)
    rounds.count()
    if verdict is not None:
        findings.verdict = verdict
        findings.same_culprit = locate_culprit(verdict.culprit) == locate_culprit(recorded.verdict.culprit)
        path = next((remedy.target for remedy in verdict.remedies if remedy.kind == "island"), None)
        if path is not None:
            way = f"{precision.name}, {path or 'the model'} in fp32"
            rounds.note(way, _try_replay(replayed, attempt, precision, (path,)), precision, path)
    on_progress(ROUNDS, ROUNDS)


class _RerunRounds:
    """The rows of the report, and the progress bar."""

    def __init__(self, rows: list[Rerun], on_progress: OnProgress) -> None:
        self._rows = rows
        self._told, self._done = on_progress, 0
        on_progress(0, ROUNDS)

    def note(self, way: str, outcome: TrialOutcome, precision: Precision, island: str | None = None) -> None:
        figures = (outcome.finite, outcome.loss, outcome.grad_norm, outcome.error)
        self._rows.append(Rerun(way, precision.name, island, *figures))
        self.count()

    def count(self) -> None:
        self._done += 1
        self._told(self._done, ROUNDS)


def _find_failing_attempt(replayed: ReplayableStep, rounds: _RerunRounds) -> tuple[StepInputs, TrialOutcome]:
    """Return the attempt of the first rank whose step fails here, with its outcome; each rank had its own batch."""
    precision = replayed.choice.precision
    own = precision.name == replayed.record.step.precision
    for rank, load in enumerate(replayed.attempts):
        attempt = load()
        outcome = _try_replay(replayed, attempt, precision)
        if not outcome.finite or rank == len(replayed.attempts) - 1:
            break
    whose = f", process {rank}" if len(replayed.attempts) > 1 else ""
    rounds.note(f"as in the run: {precision.name}{whose}" if own else f"{precision.name}{whose}", outcome, precision)
    return attempt, outcome


def _try_replay(
    replayed: ReplayableStep, attempt: StepInputs, precision: Precision, islands: tuple[str, ...] = ()
) -> TrialOutcome:
    # The recorded loss scale only fits the recorded precision; the loss itself does not depend on the scale.
    as_it_was = precision.name == replayed.record.step.precision and not islands
    scaled = as_it_was and replayed.record.step.report.reason != LOSS_NOT_FINITE
    return Trials(replayed.model, attempt).run(ReplayConfig(precision, islands, None if scaled else 1.0))


def _diagnose_replay(replayed: ReplayableStep, attempt: StepInputs, first: TrialOutcome) -> Verdict | None:
    """Return None if the step is finite in the precision it ran in, unless a guard skipped it for another reason."""
    recorded, precision = replayed.record.step, replayed.choice.precision
    reason = recorded.report.reason or ""
    judge = functools.partial(
        diagnose_attempt,
        replayed.model,
        attempt,
        precision=precision,
        history=recorded.history,
        compiled=has_compiled_code(replayed.model),
    )
    if precision.name == recorded.precision:
        # A finite result in another environment does not prove that it cannot be reproduced.
        here = not first.finite or parse_guard_name(reason) is not None or not replayed.notes
        return judge(reason=reason) if here else None
    if first.finite:
        return None
    return judge(reason=LOSS_NOT_FINITE if first.loss != first.loss else GRADIENT_NOT_FINITE)


def _suggest_replay_remedy(
    verdict: Verdict | None, replayed: ReplayableStep, run: Path, task: type[Task] | str | os.PathLike[str] | None
) -> tuple[str, str]:
    """Return the remedy in words, and the command that applies it, which is empty if there is none to type."""
    record, recipe, precision = replayed.record, replayed.recipe, replayed.choice.precision.name
    if verdict is None and precision != record.step.precision:
        # Finite in another precision: that precision is the fix.
        found = advise_precision(precision)
        return found.do, _format_resume_command(record, run, found.setting, task)
    # The learning rate in the recipe file that the run was started from, without typed overrides.
    begun = next((event for event in iterate_saved_events(run / JOURNAL) if event["event"] == events.START), {})
    lr = suggest_lower_lr(recipe.optimizer.lr, record.step.history.rates, read_recipe_lr(str(begun.get("command", ""))))
    kind, words, setting = advise_remedy(verdict or record.step.verdict, lr)
    if kind == "skip" and is_finished(run):
        return f"{words}; this run continued without the batch", ""
    if setting == REPAIR and recipe.guard.mode == "repair":
        words, setting = words if kind == "skip" else f"{words}: the run did so already", ""
    return words, _format_resume_command(record, run, setting, task)


def _format_resume_command(
    record: StoredFailedStep, run: Path, setting: str, task: type[Task] | str | os.PathLike[str] | None
) -> str:
    finished = is_finished(run)
    # A command cannot name a class that was given as an object.
    if isinstance(task, type) or (finished and not setting):
        return ""
    own = f"--task {shlex.quote(str(task))}" if task else ""
    changed = "--accept-recipe-change" if setting and setting != REPAIR else ""
    launched = f"{shlex.join(build_launcher_words(record.ranks))} train"
    # Where no checkpoint is good, there is nothing to resume from.
    anew = "--new" if finished or (changed and _has_no_good_checkpoint(run)) else changed
    words = [launched, shlex.quote(str(run / RECIPE)), setting, own, anew]
    return " ".join(filter(None, words))


def _has_no_good_checkpoint(run: Path) -> bool:
    """Return whether the run gave up with checkpoints of which none is good."""
    ends = [event for event in iterate_saved_events(run / JOURNAL) if event["event"] == events.END]
    gave_up = bool(ends) and ends[-1].get("reason") == GAVE_UP and ends[-1].get("checkpoint") is None
    return gave_up and bool(list_generations(run / CHECKPOINTS))
