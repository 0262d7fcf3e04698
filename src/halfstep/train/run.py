"""Build, train, evaluate and record a whole run."""

from __future__ import annotations

import platform
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep import distributed
from halfstep._version import __version__
from halfstep.checkpoint.commit import LEAVING, CheckpointSaver
from halfstep.checkpoint.paths import CHECKPOINTS, Disk
from halfstep.data.order import SavedOrder
from halfstep.draw.notebook import PageResult
from halfstep.draw.series import collect_series
from halfstep.errors import BadRecipe, Diverged, HalfstepError, RankFailed, RanksDisagree, Stopped
from halfstep.files import read_json
from halfstep.formats import name_dtype
from halfstep.guard.repair.remedies import Remedies
from halfstep.journal import events
from halfstep.journal.events import Journal
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from halfstep.journal.telemetry import Telemetry
from halfstep.journal.text import UNFINISHED
from halfstep.metric_names import format_metric_name
from halfstep.numbers import format_duration, to_float
from halfstep.page import Column, Page, Pairs, Paragraph, Table, build_charts
from halfstep.precision import flags
from halfstep.precision.converted import find_converted_layers
from halfstep.recipe.resolve import ChosenSetting
from halfstep.status_line import OnProgress
from halfstep.train.environment import AutoChoices, read_git_revision
from halfstep.train.give_up import OUT_OF_MEMORY, build_oom_error, build_resume_command, give_up_run
from halfstep.train.guarding import Guarding
from halfstep.train.loaders import make_loaders
from halfstep.train.loop import BestEvaluation, Loop, count_planned_steps
from halfstep.train.lost_ranks import LostRanks, name_lost_ranks
from halfstep.train.outputs import RunOutputs, widen_weights
from halfstep.train.process_group import resolve_device
from halfstep.train.resume import ResumeRecord
from halfstep.train.run_folder import RESULT
from halfstep.train.setup import AnyRecipe, TrainingParts, build_training_parts, remove_initial_weights
from halfstep.train.signals import StopSignalHandler, build_not_begun_error
from halfstep.train.status import count_restarts, find_job_id
from halfstep.train.task import Task, ignore_progress
from halfstep.train.watchdog import ENDING, Beat, ignore_beat
from halfstep.train.weights import compute_weights_digest, find_infinite_buffers

if TYPE_CHECKING:
    from halfstep.step.synchronizers.shard_formats import ShardFormats

INTERRUPTED, FAILED, STOPPED, GAVE_UP = "interrupted", "failed", "stopped", "gave_up"
LOST = 1.0
"""Seconds that the end of a run waits for the last save where a rank is gone: without it none commits."""


@dataclass(frozen=True)
class Run(PageResult):
    """A finished run."""

    dir: Path
    metrics: dict[str, float]
    """The metrics of the last evaluation."""
    best: BestEvaluation
    """The task's metric, its best value, and the epoch of it."""
    reason: str
    precision: str
    seconds: float
    steps: int
    skipped: dict[str, int] = field(default_factory=dict)

    def __fspath__(self) -> str:
        """Return the folder: a run is accepted wherever the path of its folder is."""
        return str(self.dir)

    def page(self) -> Page:
        """Return the page about it: its best value, its length, its metrics and its curves."""
        # A run draws when it is shown: training loads no charts.
        from halfstep.draw.curves import build_series_charts

        best = self.best
        value = "no finite value" if best["value"] is None else f"{best['value']:.4g}, after epoch {best['epoch']}"
        skips = ", ".join(f"{count} skipped ({reason.replace('_', ' ')})" for reason, count in self.skipped.items())
        facts = (
            ("folder", str(self.dir)),
            ("precision", self.precision),
            ("steps", f"{self.steps:,}" + (f", {skips}" if skips else ", none skipped")),
            ("time", format_duration(self.seconds)),
        )
        columns = (Column("metric", wrap="fold"), Column("last evaluation", "right"))
        rows = tuple((format_metric_name(name), f"{value:.4g}") for name, value in self.metrics.items())
        metrics = Table(columns, rows, gap=True)
        charts = build_series_charts(collect_series(iterate_saved_events(self.dir / JOURNAL)))
        ended = self.reason.replace("_", " ")
        blocks = (Paragraph(f"{ended}: best {format_metric_name(best['metric'])} {value}"), Pairs(facts), metrics)
        return Page(f"run {self.dir.name}", (*blocks, *build_charts(*charts)))


def read_finished_run(folder: Path) -> Run | None:
    """Return the finished run in `folder` as its result describes it; None if there is no whole result."""
    found = read_json(folder / RESULT) or {}
    try:
        # Strict JSON has words for numbers that are not finite.
        found["metrics"] = {name: to_float(value) for name, value in found["metrics"].items()}
        return Run(folder, **{one.name: found[one.name] for one in fields(Run) if one.name != "dir"})
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def run_training(
    loop: Loop,
    folder: Path,
    *,
    label: str,
    command: str,
    notes: list[str],
    sizing: Sequence[ChosenSetting] = (),
    resumed: ResumeRecord | None = None,
    lost: LostRanks | None = None,
) -> Run:
    """Train the loop of `make_loop`, and write everything to `folder`. Every rank calls it.

    `sizing` are the settings chosen for the data set and the machine, recorded with their reasons; `lost` names ranks
    that are gone. Raises Stopped, Diverged, OutOfMemory, StorageFailed, RankFailed or RanksDisagree where the run ends
    otherwise than planned.
    """
    # Counted from the start of the journal: a resumed run includes its earlier launches.
    began, journal = time.perf_counter() - loop.journal.seconds, loop.journal
    loop.outputs.facts(loop.task)
    facts = {
        "format": events.FORMAT,
        "label": label,
        "dir": str(folder),
        "command": command,
        **_collect_start_facts(loop),
    }
    facts |= {
        "host": socket.gethostname(),
        "rank": distributed.rank(),
        "job": find_job_id(),
        "restarts": count_restarts(),
    }
    facts |= {"notes": [*notes, *facts["notes"]], "sizing": [one._asdict() for one in sizing]}
    journal.emit(events.START, **facts, resumed=None if resumed is None else resumed.as_dict())
    reason: str = FAILED
    more: Mapping[str, str | None] = {}
    leaving = LEAVING
    try:
        with _note_ending(loop), name_lost_ranks(lost):
            if resumed is not None and resumed.is_new_length_or_settings:
                # A checkpoint with the new settings, so that they need not be accepted again.
                loop.checkpoints.save()
                loop.checkpoints.finish()
            reason = loop.run()
            loop.checkpoints.finish()
            weights = _require_same_weights(loop.parts, journal)
    except KeyboardInterrupt:
        reason = INTERRUPTED
        if loop.checkpoints.remote is not None:
            loop.checkpoints.remote.wait = 0.0
        raise
    except Stopped:
        saved = loop.checkpoints
        reason, more = (
            STOPPED,
            {"signal": loop.stopping.asked, "checkpoint": saved.name, "checkpoint_note": saved.doubt},
        )
        raise
    except Diverged as error:
        reason, ending = GAVE_UP, give_up_run(loop, error, command)
        more = ending.as_dict()
        raise ending.error from error
    except Exception as error:
        if (failed := build_oom_error(loop, error, command)) is None:
            leaving = LOST if isinstance(error, RankFailed) and not error.usable else LEAVING
            # The traceback, for the log, of an error that does not explain itself, such as one of a task's own code.
            more = {} if isinstance(error, HalfstepError) else {"error": "".join(traceback.format_exception(error))}
            raise
        reason, more = OUT_OF_MEMORY, {"error": failed.given}
        raise failed from None
    finally:
        # Before the end is recorded: the last save may still fail or succeed.
        loop.checkpoints.close(leaving)
        run = _build_finished_run(loop, folder, reason, time.perf_counter() - began)
        summary = {key: getattr(run, key) for key in ("metrics", "best", "seconds", "steps", "skipped")}
        remedies = [str(remedy) for remedy in loop.guarding.remedies.placed]
        more = {**_suggest_resuming(reason, folder, command), **more}
        loop.journal.emit(events.END, reason=reason, remedies=remedies, **summary, **more)
    result = {**_build_result(run, loop.parts, weights), "remedies": loop.guarding.remedies.as_dict()}
    loop.outputs.result(result, run.best["epoch"])
    return run


def _suggest_resuming(reason: str, folder: Path, command: str) -> dict[str, str]:
    """Return the command that resumes a run which ended before its end; a call in Python is not known in full."""
    if reason not in UNFINISHED or not command.startswith("halfstep "):
        return {}
    return {"do": build_resume_command(folder, command, {}, None)}


@contextmanager
def _note_ending(loop: Loop) -> Iterator[None]:
    """Note at the end, however it comes, that this rank waits for no other one any more: they may end before it."""
    try:
        yield
    finally:
        loop.beat(ENDING)


def make_loop(
    task: Task,
    recipe: AnyRecipe,
    folder: Path,
    journal: Journal,
    *,
    auto_choices: AutoChoices | None = None,
    remedies: Remedies | None = None,
    order: SavedOrder | None = None,
    stopping: StopSignalHandler | None = None,
    on_progress: OnProgress = ignore_progress,
    beat: Beat = ignore_beat,
    disk: Disk | None = None,
) -> Loop:
    """Build everything for a run without taking a step.

    `auto_choices` is what an earlier launch of this run measured, `remedies` what its guard had placed, and `order` the
    order of its samples. With `auto_choices`, the weights come from a checkpoint. `beat` is called with everything that
    the loop does. `disk` writes the checkpoints.
    """
    stopping = stopping or StopSignalHandler()
    starting = recipe
    if auto_choices is not None:
        # The checkpoint has the weights: nothing is downloaded or read for the initial ones.
        starting = task.recipe = remove_initial_weights(recipe)
    device = resolve_device(recipe.train.device)
    beat("reading the data", 0)
    loaders = make_loaders(task, recipe, device, auto_choices.num_workers if auto_choices else None, order)
    _raise_if_stopped(stopping)
    per_epoch = loaders.train.steps_per_epoch
    total = count_planned_steps(recipe, per_epoch)
    # A resumed run may have its warm-up behind it.
    if auto_choices is None:
        _check_warmup_length(recipe, total)
    beat("building the model", 0)

    def told(done: int, of: int) -> None:
        beat("preparing the data", done)
        on_progress(done, of)

    parts = build_training_parts(
        task,
        starting,
        device,
        total=total,
        per_epoch=per_epoch,
        precision=auto_choices.precision if auto_choices else None,
        remedies=remedies,
        on_progress=told,
    )
    _raise_if_stopped(stopping)
    parts.notes += loaders.notes
    options = recipe.checkpoint
    return Loop(
        task,
        recipe,
        parts,
        loaders.train,
        loaders.val,
        journal=journal,
        outputs=RunOutputs(
            folder, journal, recipe.run.pictures, find_infinite_buffers(parts.model), recipe.run.pictures_kept
        ),
        telemetry=Telemetry(device).read,
        auto_choices=replace(
            auto_choices or AutoChoices(parts.choice.precision.name, parts.choice.reasons, loaders.workers),
            order=loaders.order,
        ),
        data_fingerprint=loaders.data_fingerprint,
        saver=CheckpointSaver(
            folder / CHECKPOINTS,
            keep=options.keep,
            party=distributed.RankGroup(),
            background=options.background,
            disk=disk,
        ),
        guarding=Guarding(parts.stepper, recipe.guard, journal, folder, remedies),
        stopping=stopping,
        beat=beat,
    )


def _check_warmup_length(recipe: AnyRecipe, total: int) -> None:
    """Raise BadRecipe if the run ends before its warm-up: it would never reach its learning rate."""
    if recipe.schedule.warmup_steps >= total:
        raise BadRecipe(
            f"schedule.warmup_steps={recipe.schedule.warmup_steps}, and the whole run has {total} steps",
            allowed="a warm-up that ends before the run does",
            do=f"write schedule.warmup_steps={total // 20}, or train longer",
        )


def _raise_if_stopped(stopping: StopSignalHandler) -> None:
    """Stop between two stages of setup, where one of the ranks was asked to."""
    asked = [name for name in distributed.gather_texts(stopping.asked or "") if name]
    if asked:
        raise build_not_begun_error(stopping.asked or asked[0])


def _collect_start_facts(loop: Loop) -> dict[str, Any]:
    """Return the facts that are shown before the first step."""
    task, train, choice, device = loop.task, loop.recipe.train, loop.parts.choice, loop.stepper.device
    parameters, samples = list(loop.model.parameters()), len(loop.train.samples)
    return {
        "recipe": loop.recipe.model_dump(mode="json"),
        "notes": loop.parts.notes,
        "generates": task.generates,
        "steps": loop.planned,
        "epochs": loop.epochs,
        "precision": {
            # A resumed run takes what `auto` resolved to by name.
            "asked": loop.recipe.precision,
            "took": choice.took,
            "chosen": choice.precision.name,
            "summary": choice.precision.summary,
            "converted": find_converted_layers(loop.model),
            "reasons": list(choice.reasons),
        },
        "shards": _collect_shard_facts(loop.stepper.shard_formats),
        "device": {"name": choice.device.name, "place": str(device)},
        "batch": {
            "per_device": train.batch_size,
            "devices": distributed.count_ranks(),
            "microbatches": train.microbatches,
            "total": loop.train.share.window,
        },
        "steps_per_epoch": loop.train.steps_per_epoch,
        "samples": {"train": samples, "val": len(loop.val.samples)},
        "repeated_samples": loop.train.share.repeats(samples),
        "parameters": {
            "total": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        },
        "flags": flags.read_fp32_flags(),
        "versions": {"halfstep": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "git": read_git_revision(Path.cwd()),
        "metric": {"name": task.metric, "higher_is_better": task.higher_is_better},
        "findings": [finding.as_dict() for finding in loop.stepper.findings],
    }


def _collect_shard_facts(found: Sequence[ShardFormats]) -> dict[str, Any] | None:
    if not found:
        return None
    from halfstep.step.synchronizers.shard_formats import describe_shard_formats  # loaded where there are shards

    groups = [{"group": one.group, "gathered": one.gathered, "reduced": name_dtype(one.reduced)} for one in found]
    return {"summary": describe_shard_formats(found), "groups": groups}


def _build_finished_run(loop: Loop, folder: Path, reason: str, seconds: float) -> Run:
    counts = loop.stepper.counts
    return Run(
        dir=folder,
        metrics=loop.last_evaluation,
        best=loop.best,
        reason=reason,
        precision=loop.parts.choice.precision.name,
        seconds=seconds,
        steps=counts.applied,
        skipped=dict(counts.skipped),
    )


def _build_result(run: Run, parts: TrainingParts, weights: str) -> dict[str, object]:
    observed = parts.stepper.observed
    return {
        "reason": run.reason,
        "metrics": run.metrics,
        "best": run.best,
        "precision": run.precision,
        "observed": None if observed is None else {"expected": observed.expected, "share": observed.share},
        "seconds": run.seconds,
        "steps": run.steps,
        "skipped": run.skipped,
        "weights": weights,
    }


def _require_same_weights(parts: TrainingParts, journal: Journal) -> str:
    """Return the digest of the weights; raise RanksDisagree unless it is the same on all ranks."""
    weights = compute_weights_digest(widen_weights(parts.model, parts.stepper.weights))
    if distributed.count_ranks() == 1:
        return weights
    digests = distributed.gather_texts(weights)
    if len(set(digests)) > 1:
        raise RanksDisagree(
            f"the weights differ between processes at the end: {', '.join(d[:12] for d in digests)}",
            allowed="the same weights on every process",
            do="report this with the recipe: every step was checked, so this should not happen",
        )
    text = f"weights are bitwise equal on {len(digests)} processes (sha256 {digests[0][:16]})"
    journal.emit(events.NOTE, text=text, level="info")
    return weights
