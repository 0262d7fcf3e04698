"""Replay a failed step in several precisions and return the results as plain data."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep.checkpoint.paths import CHECKPOINTS, generations
from halfstep.errors import BadData, HalfstepError
from halfstep.guard.diagnosis.diagnose import diagnose
from halfstep.guard.diagnosis.rerun import ReplayConfig, uses_compiled
from halfstep.guard.diagnosis.trials import TrialOutcome, Trials
from halfstep.guard.verdict import DATA, HARDWARE, WARM_UP, Culprit, Cure, Verdict
from halfstep.journal import events
from halfstep.journal.jsonl import JOURNAL, kept_events
from halfstep.precision.precision import Precision, precision_named
from halfstep.precision.select import Choice, choose_precision
from halfstep.runs.finished import task_of
from halfstep.status_line import OnProgress
from halfstep.step.report import GRADIENT_NOT_FINITE, GUARD, LOSS_NOT_FINITE
from halfstep.step.step_inputs import StepInputs
from halfstep.train.environment import differences, environment
from halfstep.train.failed_steps.reading import load_attempt, load_model, recipe_digest, run_of
from halfstep.train.failed_steps.record import Record
from halfstep.train.give_up import launcher, lower_rate, written_rate
from halfstep.train.process_group import AUTO, device_of
from halfstep.train.run import GAVE_UP
from halfstep.train.run_folder import RECIPE, is_finished
from halfstep.train.setup import make_model, without_weights
from halfstep.train.task import Task

# -- replayed ---------------------------------------------------------------------------------------------------------
# Load a failed step: model and batch from its record, the task from the run's recipe.


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

    Raise `BadData` where the record has no tensors.
    """
    if record.without:
        raise BadData(
            f"attempt {record.report.attempt:,} was recorded without its tensors: {record.without}",
            allowed="a step whose weights and batch were kept",
            do="read what the run said about it: add --list",
        )
    run = run_of(record.path)
    task = task_of(run, own)
    recipe = task.recipe
    device = _device(recipe.train.device)
    task.recipe = without_weights(recipe)
    # The record holds the weights of the failed step; pretrained ones are not fetched for it.
    model, _ = make_model(task, task.recipe, device)
    load_model(record, model)
    choice = choose_precision(precision or record.precision, device=device)
    choice.precision.prepare(model.train(), device)
    loss = functools.partial(_loss, task)
    attempts = tuple(functools.partial(load_attempt, record, rank, loss, device) for rank in range(len(record.batches)))
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
    notes = differences(record.environment, environment(device))
    if record.recipe != recipe_digest(run):
        notes.append(f"{RECIPE} was changed since")
    if record.batch_changed:
        notes.append("something wrote into the batch during the step, so what was kept is not what the step began with")
    if choice.precision.name != (asked or record.precision):
        notes.append(f"{asked or record.precision} was asked for, and {choice.precision.name} is what this device has")
    if len(record.batches) > 1:
        notes.append(f"gradients of {len(record.batches)} processes are not summed here; each one's step is run alone")
    return notes


# -- replaying --------------------------------------------------------------------------------------------------------


ALSO = ("fp32", "bf16")
"""Precisions a failed step is tried in besides its own."""
ROUNDS = len(ALSO) + 3
"""Its own precision, those above, the diagnosis, and an island."""


def described(record: Record) -> dict[str, Any]:
    """Return what the run recorded about the step."""
    report, verdict = record.report, record.verdict
    return {
        "attempt": report.attempt,
        "step": report.step,
        "reason": report.reason,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale,
        "precision": record.precision,
        "islands": list(record.islands),
        "device": record.environment.get("device"),
        "verdict": verdict.as_dict(),
        "without": record.without,
    }


def replay(replayed: Replayed, report: dict[str, Any], told: OnProgress) -> Verdict | None:
    """Run the step in several ways and fill in `report`; return the verdict, None where the step is finite here."""
    rounds = _Rounds(report, told)
    record, precision = replayed.record, replayed.choice.precision
    attempt, first = _failing(replayed, rounds)
    ways = [name for name in dict.fromkeys((record.precision, *ALSO)) if name != precision.name]
    for name in ways[: len(ALSO)]:
        rounds.note(name, _tried(replayed, attempt, precision_named(name)), precision_named(name))
    verdict = _verdict(replayed, attempt, first)
    rounds.count()
    if verdict is not None:
        report["verdict"] = verdict.as_dict()
        report["same_culprit"] = _key(verdict.culprit) == _key(record.verdict.culprit)
        _try_island(replayed, attempt, verdict, rounds)
    told(ROUNDS, ROUNDS)
    return verdict


class _Rounds:
    """The rows of the report, and the progress bar."""

    def __init__(self, report: dict[str, Any], told: OnProgress) -> None:
        self._rows: list[dict[str, Any]] = report.setdefault("reruns", [])
        self._told, self._done = told, 0
        told(0, ROUNDS)

    def note(self, way: str, outcome: TrialOutcome, precision: Precision, island: str | None = None) -> None:
        self._rows.append(
            {
                "way": way,
                "precision": precision.name,
                "island": island,
                "finite": outcome.finite,
                "loss": outcome.loss,
                "grad_norm": outcome.grad_norm,
                "error": outcome.error,
            }
        )
        self.count()

    def count(self) -> None:
        self._done += 1
        self._told(self._done, ROUNDS)


def _failing(replayed: Replayed, rounds: _Rounds) -> tuple[StepInputs, TrialOutcome]:
    """Return the attempt of the first rank whose step fails here, with its outcome; each rank had its own batch."""
    precision = replayed.choice.precision
    own = precision.name == replayed.record.precision
    for rank, load in enumerate(replayed.attempts):
        attempt = load()
        outcome = _tried(replayed, attempt, precision)
        if not outcome.finite or rank == len(replayed.attempts) - 1:
            break
    whose = f", process {rank}" if len(replayed.attempts) > 1 else ""
    rounds.note(f"as it was: {precision.name}{whose}" if own else f"{precision.name}{whose}", outcome, precision)
    return attempt, outcome


def _tried(
    replayed: Replayed, attempt: StepInputs, precision: Precision, islands: tuple[str, ...] = ()
) -> TrialOutcome:
    # The recorded loss scale only fits the recorded precision; the loss itself does not depend on the scale.
    as_it_was = precision.name == replayed.record.precision and not islands
    scaled = as_it_was and replayed.record.report.reason != LOSS_NOT_FINITE
    return Trials(replayed.model, attempt).run(ReplayConfig(precision, islands, None if scaled else 1.0))


def _verdict(replayed: Replayed, attempt: StepInputs, first: TrialOutcome) -> Verdict | None:
    """Return None where the step is finite in the precision it ran in, unless a guard skipped it for another reason."""
    record, precision = replayed.record, replayed.choice.precision
    reason = record.report.reason or ""
    judge = functools.partial(
        diagnose,
        replayed.model,
        attempt,
        precision=precision,
        history=record.history,
        compiled=uses_compiled(replayed.model),
    )
    if precision.name == record.precision:
        # A finite result in another environment does not prove a hardware failure.
        here = not first.finite or reason.startswith(GUARD) or not replayed.notes
        return judge(reason=reason) if here else None
    if first.finite:
        return None
    return judge(reason=LOSS_NOT_FINITE if first.loss != first.loss else GRADIENT_NOT_FINITE)


def _try_island(replayed: Replayed, attempt: StepInputs, verdict: Verdict, rounds: _Rounds) -> None:
    path = next((cure.target for cure in verdict.cures if cure.kind == "island"), None)
    if path is not None:
        precision = replayed.choice.precision
        way = f"{precision.name}, {path or 'the model'} in fp32"
        rounds.note(way, _tried(replayed, attempt, precision, (path,)), precision, path)


def _key(culprit: Culprit | None) -> Any:
    if culprit is None:
        return None
    return culprit.operation, culprit.module, culprit.backward, culprit.line, culprit.outside


# -- cure -------------------------------------------------------------------------------------------------------------
# The one command that fixes a failed run, derived from the origin of its failed step.


REPAIR = "--guard repair"
"""The option that applies remedies automatically."""
SKIP = "skip"
_MEND: dict[str, str] = {
    DATA: "mend the samples that are named, or leave them out",
    HARDWARE: "leave this batch out; look at the device where it comes back",
}


class Advice(NamedTuple):
    """A remedy in words, and the command that applies it."""

    do: str
    command: str
    """Empty where there is nothing to type."""


def advice(verdict: Verdict, record: Record, run: Path, recipe: Any, task: Path | None) -> Advice:
    """Return the remedy for a verdict, in words and as a command."""
    cure = next((cure for cure in verdict.cures if cure.works is not False), None)
    words, setting = _for(verdict, cure, lower_rate(recipe.optimizer.lr, record.history.rates, _written_rate(run)))
    skipping = cure is not None and cure.kind == SKIP
    if skipping and is_finished(run):
        return Advice(f"{words}; this run went on without the batch", "")
    if setting == REPAIR and recipe.guard.mode == "repair":
        words, setting = words if skipping else f"{words}: the run did so already", ""
    return Advice(words, _command(record, run, setting, task))


def in_precision(name: str, record: Record, run: Path, task: Path | None) -> Advice:
    """Return the advice for a step that is finite in another precision."""
    return Advice(f"compute in {name}", _command(record, run, f"precision={name}", task))


def _written_rate(run: Path) -> float | None:
    """Return the learning rate in the recipe file the run was started from, without typed overrides."""
    begun = next((event for event in kept_events(run / JOURNAL) if event["event"] == events.START), {})
    return written_rate(str(begun.get("command", "")))


def _command(record: Record, run: Path, setting: str, task: Path | None) -> str:
    finished = is_finished(run)
    if finished and not setting:
        return ""
    own = f"--task {shlex.quote(str(task))}" if task else ""
    changed = "--accept-recipe-change" if setting and setting != REPAIR else ""
    launched = f"{shlex.join(launcher(len(record.batches)))} train"
    # Where no checkpoint is good, there is nothing to resume from.
    anew = "--new" if finished or (changed and _has_only_spoilt(run)) else changed
    words = [launched, shlex.quote(str(run / RECIPE)), setting, own, anew]
    return " ".join(filter(None, words))


def _has_only_spoilt(run: Path) -> bool:
    """Return whether the run gave up with checkpoints of which none is good."""
    ends = [event for event in kept_events(run / JOURNAL) if event["event"] == events.END]
    gave_up = bool(ends) and ends[-1].get("reason") == GAVE_UP and ends[-1].get("checkpoint") is None
    return gave_up and bool(generations(run / CHECKPOINTS))


def _for(verdict: Verdict, cure: Cure | None, rate: str) -> tuple[str, str]:
    if verdict.cause == WARM_UP:
        return "nothing: the loss scale finds its place by itself", ""
    if cure is None:
        return "let the run try what it can", REPAIR
    target = cure.target
    return {
        SKIP: (_MEND.get(verdict.cause, target), REPAIR),
        "island": (f"keep the module {target} in fp32" if target else "keep the model in fp32", REPAIR),
        "precision": (f"compute in {target}", f"precision={target}"),
        "lower_rate": ("try a lower learning rate", f"optimizer.lr={rate}"),
        "eager": ("run without compiled code", "train.compile=false"),
        "fix_code": (f"{target}; then go on", ""),
        "restore": (target, ""),
    }[cure.kind]
