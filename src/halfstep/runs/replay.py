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

from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, generations
from halfstep.errors import BadData, HalfstepError, advice, reason_in
from halfstep.guard.diagnosis.diagnose import diagnose
from halfstep.guard.diagnosis.trials import TrialOutcome, Trials
from halfstep.guard.repair.advice import REPAIR, advise, advise_precision
from halfstep.guard.verdict import Verdict, place_of
from halfstep.journal import events
from halfstep.journal.jsonl import JOURNAL, saved_events
from halfstep.journal.text import GAVE_UP
from halfstep.observe.recorder import uses_compiled
from halfstep.precision.names import read_precision
from halfstep.precision.precision import Precision, precision_named
from halfstep.precision.select import Choice, choose_precision
from halfstep.recipe.schema import AUTO
from halfstep.recipe.sources import read_recipe
from halfstep.runs.finished import task_of
from halfstep.runs.registry import own_task
from halfstep.runs.replay_page import FailedStepList, ListedStep, RecordedStep, ReplayReport, Rerun
from halfstep.status_line import OnProgress
from halfstep.step.report import GRADIENT_NOT_FINITE, LOSS_NOT_FINITE, refused_by
from halfstep.step.rerun import ReplayConfig
from halfstep.step.step_inputs import StepInputs
from halfstep.terminal import progress
from halfstep.train.environment import differences, environment
from halfstep.train.failed_steps.reading import (
    Record,
    choose_recorded_precision,
    cut_off,
    failed_step_at,
    load_attempt,
    load_model,
    read,
    recipe_digest,
    recorded_in,
    refuse_earlier,
    refuse_elsewhere,
    replay_call,
    run_of,
)
from halfstep.train.give_up import launcher, lower_lr, recipe_lr
from halfstep.train.process_group import device_of
from halfstep.train.run_folder import RECIPE, is_finished, recipe_in
from halfstep.train.setup import compile_in_place, make_model, without_weights
from halfstep.train.task import Task


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
            do=advice(f"halfstep replay {folder} --list", f'halfstep.failed_steps("{folder}") says why'),
        )
    asked = read_precision(precision).name if precision else None
    record = read(_choose_step(folder, found, attempt))
    replayed = open_recorded(record, precision=asked, own=None if task is None else own_task(task))
    findings = _Findings()
    try:
        with progress("replaying", "reruns") as on_progress:
            _rerun_all(replayed, findings, on_progress)
        findings.do, findings.command = _remedy(findings.verdict, replayed, folder, task)
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
        record = _read(place)
        known = (None, record) if isinstance(record, str) else (_describe_step(record), "")
        rows.append(ListedStep(place.path, place.attempt, *known))
    section = read_recipe(str(folder / RECIPE)).raw.get("guard")
    mode = section.get("mode") if isinstance(section, dict) else section
    return FailedStepList(folder, str(mode or "watch"), tuple(rows))


@dataclass
class _Findings:
    """What a replay has found so far; an interrupt keeps it."""

    reruns: list[Rerun] = field(default_factory=list)
    verdict: Verdict | None = None
    same_culprit: bool | None = None
    do: str = ""
    command: str = ""
    interrupted: bool = False


def _find_recorded(folder: Path) -> tuple[Path, list[CheckpointDir]]:
    """Return the run's folder and its failed steps; for the folder of one failed step, only that one."""
    refuse_earlier(folder)
    # A user may point at one failed step instead of its run.
    if (only := failed_step_at(folder)) is not None:
        return recipe_in(run_of(folder)).parent, [only]
    run = recipe_in(folder).parent
    try:
        refuse_elsewhere(run)
    except OSError as error:
        raise BadData(
            str(error),
            allowed="the folder that the run made",
            do="move it away: the next step that fails makes a folder",
        ) from None
    return folder, recorded_in(run)


def _choose_step(run: Path, found: list[CheckpointDir], attempt: int | None) -> CheckpointDir:
    if attempt is None:
        # If none is intact, opening the newest reports the problem.
        records = ((place, _read(place)) for place in reversed(found))
        whole = (place for place, record in records if not isinstance(record, str) and not record.step.without)
        return next(whole, found[-1])
    for place in reversed(found):
        if place.attempt == attempt:
            return place
    raise BadData(
        f"attempt {attempt:,} of {run} was not recorded",
        allowed=", ".join(str(place.attempt) for place in found),
        do=replay_call(run, found[-1].attempt),
    )


def _read(place: CheckpointDir) -> Record | str:
    """Return the record, or its problem as far as that shows without reading its tensors."""
    try:
        record = read(place)
        return cut_off(record) or record
    except HalfstepError as error:
        return reason_in(error)


@dataclass(frozen=True)
class Replayed:
    """A failed step that can be run again."""

    record: Record
    recipe: Any
    model: nn.Module
    choice: Choice
    attempts: tuple[Callable[[], StepInputs], ...]
    """One loader per rank; attempts are loaded one at a time, because each may be large."""
    notes: tuple[str, ...]
    """Reasons why the result may differ from the original step."""


def open_recorded(record: Record, *, precision: str | None, own: type[Task] | None) -> Replayed:
    """Load the step of `record`, in its own precision or another.

    Raise `BadData` if the record has no tensors.
    """
    step = record.step
    if step.without:
        raise BadData(
            f"attempt {step.report.attempt:,} was recorded without its tensors: {step.without}",
            allowed="a step with recorded weights and batch",
            do=f"read the run's report of it: {advice('add --list', 'halfstep.failed_steps(RUN)')}",
        )
    run = run_of(record.path)
    task = task_of(run, own)
    recipe = task.recipe
    device = _device(recipe.train.device)
    task.recipe = without_weights(recipe)
    # The record holds the weights of the failed step; pretrained ones are not fetched for it.
    model, _ = make_model(task, task.recipe, device)
    compile_in_place(model, task.recipe)
    load_model(record, model)
    choice = (
        choose_precision(precision, device=device) if precision else choose_recorded_precision(step.precision, device)
    )
    choice.precision.prepare(model.train(), device)
    loss = functools.partial(_loss, task)
    attempts = tuple(functools.partial(load_attempt, record, rank, loss, device) for rank in range(record.ranks))
    return Replayed(record, recipe, model, choice, attempts, tuple(_notes(record, run, device, choice, precision)))


def _loss(task: Task, model: nn.Module, batch: Any) -> Any:
    return task.loss(model, batch, None)


def _device(name: str) -> torch.device:
    """Return the run's device, or the best one here: a step that failed on a cluster is often replayed on a
    workstation.
    """
    try:
        return device_of(name)
    except HalfstepError:
        # The device of the run does not exist here.
        return device_of(AUTO)


def _notes(record: Record, run: Path, device: torch.device, choice: Choice, asked: str | None) -> list[str]:
    step = record.step
    notes = differences(record.manifest.environment, environment(device))
    if step.recipe != recipe_digest(run):
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


def _describe_step(record: Record) -> RecordedStep:
    """Return what the run recorded about the step."""
    step, report = record.step, record.step.report
    figures = (report.attempt, report.step, report.reason, report.loss, report.grad_norm, report.loss_scale)
    device = record.manifest.environment.get("device")
    return RecordedStep(*figures, step.precision, tuple(step.islands), device, step.verdict, step.without)


def _rerun_all(replayed: Replayed, findings: _Findings, on_progress: OnProgress) -> None:
    """Run the step in several ways and fill in `findings`; without a verdict, the step is finite here."""
    rounds = _Rounds(findings.reruns, on_progress)
    recorded, precision = replayed.record.step, replayed.choice.precision
    attempt, first = _failing(replayed, rounds)
    ways = [name for name in dict.fromkeys((recorded.precision, *ALSO)) if name != precision.name]
    for name in ways[: len(ALSO)]:
        rounds.note(name, _try_replay(replayed, attempt, precision_named(name)), precision_named(name))
    verdict = _verdict(replayed, attempt, first)
    rounds.count()
    if verdict is not None:
        findings.verdict = verdict
        findings.same_culprit = place_of(verdict.culprit) == place_of(recorded.verdict.culprit)
        path = next((remedy.target for remedy in verdict.remedies if remedy.kind == "island"), None)
        if path is not None:
            way = f"{precision.name}, {path or 'the model'} in fp32"
            rounds.note(way, _try_replay(replayed, attempt, precision, (path,)), precision, path)
    on_progress(ROUNDS, ROUNDS)


class _Rounds:
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


def _failing(replayed: Replayed, rounds: _Rounds) -> tuple[StepInputs, TrialOutcome]:
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
    replayed: Replayed, attempt: StepInputs, precision: Precision, islands: tuple[str, ...] = ()
) -> TrialOutcome:
    # The recorded loss scale only fits the recorded precision; the loss itself does not depend on the scale.
    as_it_was = precision.name == replayed.record.step.precision and not islands
    scaled = as_it_was and replayed.record.step.report.reason != LOSS_NOT_FINITE
    return Trials(replayed.model, attempt).run(ReplayConfig(precision, islands, None if scaled else 1.0))


def _verdict(replayed: Replayed, attempt: StepInputs, first: TrialOutcome) -> Verdict | None:
    """Return None if the step is finite in the precision it ran in, unless a guard skipped it for another reason."""
    recorded, precision = replayed.record.step, replayed.choice.precision
    reason = recorded.report.reason or ""
    judge = functools.partial(
        diagnose,
        replayed.model,
        attempt,
        precision=precision,
        history=recorded.history,
        compiled=uses_compiled(replayed.model),
    )
    if precision.name == recorded.precision:
        # A finite result in another environment does not prove that it cannot be reproduced.
        here = not first.finite or refused_by(reason) is not None or not replayed.notes
        return judge(reason=reason) if here else None
    if first.finite:
        return None
    return judge(reason=LOSS_NOT_FINITE if first.loss != first.loss else GRADIENT_NOT_FINITE)


def _remedy(
    verdict: Verdict | None, replayed: Replayed, run: Path, task: type[Task] | str | os.PathLike[str] | None
) -> tuple[str, str]:
    """Return the remedy in words, and the command that applies it, which is empty if there is none to type."""
    record, recipe, precision = replayed.record, replayed.recipe, replayed.choice.precision.name
    if verdict is None and precision != record.step.precision:
        # Finite in another precision: that precision is the fix.
        found = advise_precision(precision)
        return found.do, _resume_command(record, run, found.setting, task)
    # The learning rate in the recipe file that the run was started from, without typed overrides.
    begun = next((event for event in saved_events(run / JOURNAL) if event["event"] == events.START), {})
    lr = lower_lr(recipe.optimizer.lr, record.step.history.rates, recipe_lr(str(begun.get("command", ""))))
    kind, words, setting = advise(verdict or record.step.verdict, lr)
    if kind == "skip" and is_finished(run):
        return f"{words}; this run continued without the batch", ""
    if setting == REPAIR and recipe.guard.mode == "repair":
        words, setting = words if kind == "skip" else f"{words}: the run did so already", ""
    return words, _resume_command(record, run, setting, task)


def _resume_command(record: Record, run: Path, setting: str, task: type[Task] | str | os.PathLike[str] | None) -> str:
    finished = is_finished(run)
    # A command cannot name a class that was given as an object.
    if isinstance(task, type) or (finished and not setting):
        return ""
    own = f"--task {shlex.quote(str(task))}" if task else ""
    changed = "--accept-recipe-change" if setting and setting != REPAIR else ""
    launched = f"{shlex.join(launcher(record.ranks))} train"
    # Where no checkpoint is good, there is nothing to resume from.
    anew = "--new" if finished or (changed and _has_no_good_checkpoint(run)) else changed
    words = [launched, shlex.quote(str(run / RECIPE)), setting, own, anew]
    return " ".join(filter(None, words))


def _has_no_good_checkpoint(run: Path) -> bool:
    """Return whether the run gave up with checkpoints of which none is good."""
    ends = [event for event in saved_events(run / JOURNAL) if event["event"] == events.END]
    gave_up = bool(ends) and ends[-1].get("reason") == GAVE_UP and ends[-1].get("checkpoint") is None
    return gave_up and bool(generations(run / CHECKPOINTS))
