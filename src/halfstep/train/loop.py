"""The training loop: steps, reports, an evaluation after every epoch, and the best and last weights on disk."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from torch import nn

from halfstep import distributed, numbers
from halfstep.checkpoint.commit import CheckpointSaver
from halfstep.data.dataset import BadSampleBudget, Batch, ReplacedSample, Sample, find_nonfinite_samples
from halfstep.data.fingerprint import Fingerprint
from halfstep.data.loader import TrainLoader, ValLoader
from halfstep.errors import BadData, Diverged
from halfstep.journal import events
from halfstep.journal.events import Journal
from halfstep.journal.jsonl import read_journal_sizes
from halfstep.journal.telemetry import MeterReadings
from halfstep.metric_names import format_metric_name
from halfstep.step.report import StepReport, parse_guard_name
from halfstep.step.window import Window
from halfstep.train.checkpointing import Checkpoints
from halfstep.train.environment import AutoChoices
from halfstep.train.epoch_metrics import EpochMetrics, RunProgress
from halfstep.train.evaluation import SampleChooser, SoFar, StopEvaluation, evaluate_model
from halfstep.train.guarding import Guarding
from halfstep.train.outputs import RunOutputs, use_ema_weights
from halfstep.train.setup import AnyRecipe, TrainingParts
from halfstep.train.sharding import ReductionNotes
from halfstep.train.signals import AFTER_BATCH, AFTER_PICTURES, AFTER_STEP, SAVED, StopSignalHandler
from halfstep.train.state import RunObjects
from halfstep.train.task import Task
from halfstep.train.throughput import (
    ENOUGH,
    RunLength,
    Throughput,
    TimeLeft,
    describe_long_run,
    is_evaluated,
)
from halfstep.train.watchdog import Beat, ignore_beat


class SampleReports:
    """A collector of replaced samples; over the budget, every rank stops at the same step."""

    def __init__(self, journal: Journal, limit: int) -> None:
        self._journal, self.budget = journal, BadSampleBudget(limit)
        self._pending: list[ReplacedSample] = []

    def add(self, replaced: Sequence[ReplacedSample]) -> None:
        """Add replaced samples; a single rank records them at once."""
        self._pending += replaced
        if self._pending and distributed.count_ranks() == 1:
            self.exchange()

    def exchange(self) -> None:
        """Record the replaced samples of all ranks; raise BadData over the budget. All ranks call it together."""
        gathered = distributed.run_and_gather_results(lambda: self._pending)
        self._pending = []
        for rank, replaced in ((rank, ReplacedSample(*row)) for rank, rows in enumerate(gathered) for row in rows):
            self._journal.emit(
                events.BAD_SAMPLE,
                rank=rank,
                name=replaced.name,
                reason=replaced.reason,
                index=replaced.number,
                replacement=replaced.by,
            )
            self.budget.spend([replaced])

    def suspects(self, window: Sequence[Batch]) -> tuple[list[int], list[int]]:
        """Return the samples of a failed step over all ranks, and those of them with non-finite values."""
        ids = [number for batch in window for number in batch.ids]
        nonfinite = [number for batch in window for number in find_nonfinite_samples(batch)]
        gathered = distributed.run_and_gather_results(lambda: [ids, nonfinite])
        return sorted({n for rank in gathered for n in rank[0]}), sorted({n for rank in gathered for n in rank[1]})


FINISHED, EARLY = "finished", "early_stopping"


class BestEvaluation(TypedDict):
    """The best evaluation so far."""

    metric: str
    value: float | None
    epoch: int


class Loop:
    """One run. `run()` trains it to its end; `attempts()` does the same, a step at a time."""

    def __init__(
        self,
        task: Task,
        recipe: AnyRecipe,
        parts: TrainingParts,
        train: TrainLoader,
        val: ValLoader,
        *,
        journal: Journal,
        outputs: RunOutputs,
        telemetry: Callable[[], MeterReadings],
        auto_choices: AutoChoices,
        data_fingerprint: Fingerprint,
        saver: CheckpointSaver,
        guarding: Guarding,
        stopping: StopSignalHandler,
        beat: Beat = ignore_beat,
    ) -> None:
        self.task, self.recipe, self.parts = task, recipe, parts
        self.train, self.val = train, val
        self.journal, self.outputs, self.telemetry = journal, outputs, telemetry
        self.stepper, self.model = parts.stepper, parts.model
        self.throughput = Throughput()
        self.sample_reports = SampleReports(journal, recipe.data.bad_samples)
        self.live = RunObjects(
            recipe,
            parts,
            RunProgress(),
            EpochMetrics(task.metrics().to(parts.stepper.device)),
            self.sample_reports.budget,
            train.samples,
            auto_choices,
            data_fingerprint,
            {},
            functools.partial(read_journal_sizes, outputs.folder),
        )
        self.progress, self.epoch_metrics = self.live.progress, self.live.epoch_metrics
        self.checkpoints = Checkpoints(self.live, saver, journal)
        self.guarding, self.stopping, self._beat = guarding, stopping, beat
        self._reduction = ReductionNotes(recipe.world, parts.stepper, journal)
        # After a rollback, checkpoints of the abandoned steps must not be resumed from.
        guarding.rolled_back, guarding.progress = self.checkpoints.set_aside, self.progress
        self.planned = count_planned_steps(recipe, train.steps_per_epoch)
        self.epochs = -(-self.planned // train.steps_per_epoch)
        # Evaluation batches have the size of a micro-batch: this is their number in steps.
        evaluation = len(val) / recipe.train.microbatches
        self.time_left = TimeLeft(RunLength(self.planned, self.epochs, recipe.evaluate.every_epochs, evaluation))
        # No method of the loop: the Stepper includes the modules that a loss function holds.
        self._measured = functools.partial(_compute_batch_loss, task, beat, self.progress, self.epoch_metrics.metrics)
        # Replays of a failed step must not update the metrics.
        self._plain = functools.partial(_compute_batch_loss, task, beat, self.progress, None)
        # A skipped step must not count in the training metrics, so the Stepper rolls them back with the rest.
        parts.stepper.include(self.epoch_metrics.counts)
        self._observed, self._evaluated, self._is_fresh = self.stepper.observed, 0.0, True
        self._stop, self._looked = distributed.SharedFlag(), 0.0
        # With several ranks the others wait in a collective: they all stop when the sample is read, or given up.
        train.while_waiting = self._stop_if_alone
        val.while_waiting = self._stop_evaluation_if_alone
        train.given_up = val.given_up = self._tell_given_up
        self._so_far: SoFar = dict
        self.is_evaluating = False

    def run(self) -> str:
        """Train to the end, and return the reason why the run ended."""
        for _ in self.attempts():
            pass
        return EARLY if self._is_enough() else FINISHED

    def attempts(self) -> Iterator[StepReport]:
        """Yield the report of every step. A started epoch always ends with its evaluation."""
        self.model.train()
        self._stop_if_alone()
        while (self.progress.step_in_epoch or self._left(self.progress.epoch)) and not self._is_enough():
            yield from self._epoch()
        self.stopping.will_stop(SAVED)
        self.beat("saving")

    def beat(self, phase: str) -> None:
        """Report to the watchdog that the run continues, with this phase of the present step."""
        self._beat(phase, self.progress.attempts)

    def _left(self, epochs: int) -> bool:
        """Return whether steps are left after so many epochs; the length of an epoch may have changed on the way."""
        return self.progress.attempts < self.planned and (epochs < self.epochs or self.recipe.train.steps is not None)

    def _is_enough(self) -> bool:
        patience = self.recipe.evaluate.patience
        return patience is not None and self.progress.evaluations_since_best >= patience

    # -- one epoch ------------------------------------------------------------------------------------------------

    def _epoch(self) -> Iterator[StepReport]:
        epoch, began, at = self.progress.epoch + 1, time.perf_counter(), self.progress.attempts
        yield from self.steps()
        self.sample_reports.exchange()
        train, skipped, steps = (
            self.epoch_metrics.values(),
            dict(self.epoch_metrics.skipped),
            self.progress.attempts - at,
        )
        seconds = time.perf_counter() - began
        val = self._evaluate(epoch) if self._is_due(epoch) else None
        is_best = val is not None and self._judge(epoch, val)
        # After the evaluation: a stop during it resumes at the end of this epoch, and evaluates again.
        self.progress.epoch, self.progress.step_in_epoch = epoch, 0
        if not self.guarding.alarmed or self._is_enough() or not self._left(epoch):  # otherwise the old file is better
            self.outputs.last(self.model, self.stepper.ema, self.stepper.weights)
        self.time_left.closed(val is not None)
        self.journal.emit(
            events.EPOCH,
            epoch=epoch,
            epochs=max(epoch, self.epochs),
            train=train,
            val=val,
            best=self.best,
            is_best=is_best,
            seconds=seconds,
            lr=self.parts.lr,
            skipped=skipped,
            seconds_left=self.time_left.of_run(self.progress.attempts, epoch),
            **self._rate(steps * self.train.share.window / seconds),
        )

    def _is_due(self, epoch: int) -> bool:
        return is_evaluated(epoch, self.recipe.evaluate.every_epochs) or not self._left(epoch)

    # -- one step -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[StepReport]:
        """Yield the remaining steps of this epoch, each taken when it is requested."""
        if self.progress.step_in_epoch == 0:
            self.epoch_metrics.reset()
            self.train.samples.quarantined = self.progress.begin_epoch()
        self.stopping.will_stop(AFTER_STEP)
        self.time_left.begin()
        self.throughput.read()
        if self.progress.attempts >= self.planned:
            return
        self.beat("reading")
        self._tell_stage(f"reading the first {self.train.share.window} samples")
        for window in self.throughput.waiting(self.train.windows(self.progress.epoch, self.progress.step_in_epoch)):
            self._stop_if_alone()  # a stop during reading or evaluation need not wait for a step
            self._tell_stage(self._computing())
            self._is_fresh = False
            report = self._step(self.progress.epoch + 1, window)
            self._finish_step()
            yield report
            self.beat("reading")
            if self.progress.attempts >= self.planned:
                return

    def _tell_stage(self, doing: str) -> None:
        """Emit the current stage before the first step of this launch, which may take a minute."""
        if self._is_fresh:
            self.journal.emit(events.STAGE, text=doing)

    def _computing(self) -> str:
        compiling = "compiling the model and " if self.recipe.train.compile else ""
        return f"{compiling}computing the first step in {self.parts.choice.precision.name}, recording its operations"

    def _finish_step(self) -> None:
        """Save where it is due, record finished saves, and stop where that was requested."""
        ended = self.progress.step_in_epoch == self.train.steps_per_epoch or self.progress.attempts >= self.planned
        by_steps = self.progress.attempts % self.recipe.checkpoint.every_steps == 0
        # By the clock of rank 0, which reaches all ranks with the step's agreement vector.
        if ended or by_steps or self.stepper.save_agreed:
            # Replaced samples count toward the budget in the checkpoint, so all ranks need the same set first.
            self.beat("saving")
            self.sample_reports.exchange()
            self.checkpoints.save_unless(self.guarding.alarmed)
        self.checkpoints.replicas.check_if_due(self.time_left.per_step)
        self.checkpoints.record_finished()
        # The stop votes are all-reduced with the step's agreement vector, so all ranks stop after the same step.
        self._stop_if_asked(self.stepper.stop_votes)

    def _stop_if_alone(self) -> None:
        """Stop where there is no other rank to agree with."""
        self._stop_if_asked(int(self.stopping.asked is not None) if distributed.count_ranks() == 1 else 0)

    def _tell_given_up(self, name: str, reason: str) -> None:
        """Report a sample that took too long at once: with several of them, the run may not come to their batch."""
        self.beat("evaluating" if self.is_evaluating else "reading")
        self.journal.note(f"{name} is given up: {reason}", "warning")

    def _stop_evaluation_if_alone(self) -> None:
        if self.stopping.asked is not None and distributed.count_ranks() == 1:
            raise StopEvaluation

    def _stop_if_asked(self, hands: int) -> None:
        if hands:
            self.beat("saving")
            self.sample_reports.exchange()
            self.checkpoints.stop(self.stopping.asked or "another process", self.planned, self.guarding.alarmed)

    def take_step(self, window: Window) -> StepReport:
        """Take one step, under the run's guard if it has one."""
        guardian = self.guarding.guardian
        if guardian is None:
            return self.stepper.step(self._measured, window)
        return guardian.step(self._measured, window, again=self._plain)

    def _step(self, epoch: int, window: Sequence[Batch]) -> StepReport:
        # Read before the step: the step advances the schedule.
        lr, due = self.parts.lr, self.progress.step_in_epoch % self.recipe.run.log_every == 0
        self.stepper.stop_requested = self.stopping.asked is not None
        self.stepper.save_requested = self.checkpoints.clock.is_due
        batches = Window(batch.tensors for batch in window)
        ended = None
        try:
            report = self.take_step(batches)
        except Diverged as error:
            # Without a report, the error did not come from a step, and there is nothing to write to the journal first.
            if error.report is None:
                raise
            report, ended = error.report, error
        self.progress.attempts += 1
        self.progress.step_in_epoch += 1
        self.epoch_metrics.add(report)
        self.throughput.count(self.train.share.window)
        self.sample_reports.add([replaced for batch in window for replaced in batch.replaced])
        more = {} if report.applied else self._skipped(report, window)
        self.journal.emit(
            events.STEP,
            epoch=epoch,
            step_in_epoch=self.progress.step_in_epoch,
            attempt=report.attempt,
            step=report.step,
            loss=report.loss,
            lr=lr,
            loss_scale=report.loss_scale,
            grad_norm=report.grad_norm,
            applied=report.applied,
            reason=report.reason,
            **more,
        )
        self.guarding.handle_events(report, more.get("quarantined", ()), ended)
        self._tell_observed()
        self._reduction.after_step(report.attempt)
        self.time_left.stepped()
        if self.time_left.steps_timed == ENOUGH:
            self._tell_if_too_long()
            due = True  # the first step is observed and takes as long as several: the time left was wrong until now
        if due:
            self._tell_speed()
        return report

    def _skipped(self, report: StepReport, window: Sequence[Batch]) -> dict[str, list[int]]:
        """Return the samples of a skipped step; those with non-finite values are left out of the next epochs."""
        ids, nonfinite = self.sample_reports.suspects(window)
        # A guard has its own reasons to refuse a step; non-finite samples are not among them.
        if nonfinite and parse_guard_name(report.reason) is None:
            self.progress.suspected = sorted({*self.progress.suspected, *nonfinite})
        return {"ids": ids, "quarantined": nonfinite}

    def _tell_observed(self) -> None:
        """Emit the observed precision, and again where a later look finds another."""
        seen = self.stepper.observed
        if seen is not None and seen != self._observed:
            self._observed = seen
            gathered = self.stepper.gathered_bytes
            weights = "" if gathered is None else f"; an update gathers {numbers.format_bytes(gathered)} of weights"
            text = f"{seen}{weights}"
            self.journal.emit(events.PRECISION_CHECK, expected=seen.expected, share=seen.share, text=text)

    def _rate(self, samples_per_second: float) -> dict[str, float]:
        tokens = self.task.tokens_per_sample
        more = {} if tokens is None else {"tokens_per_second": tokens * samples_per_second}
        return {"samples_per_second": samples_per_second, **more}

    def _tell_speed(self) -> None:
        self.sample_reports.exchange()
        samples_per_second, waiting = self.throughput.read()
        attempts, in_epoch, left = self.progress.attempts, self.progress.step_in_epoch, self.time_left
        to_its_end = min(self.train.steps_per_epoch - in_epoch, self.planned - attempts)
        self.journal.emit(
            events.SPEED,
            **self._rate(samples_per_second),
            wait_share=waiting,
            seconds_left=left.of_run(attempts, self.progress.epoch),
            seconds_left_in_epoch=left.of_steps(to_its_end),
            is_rough=left.is_rough,
            train_metrics=self.epoch_metrics.metric_values()
            if distributed.count_ranks() == 1
            else {},  # a collective, and only rank 0 logs
            meters=self.guarding.readings,
            **self.telemetry(),
        )

    def _tell_if_too_long(self) -> None:
        left, now = self.time_left, self.progress
        text = describe_long_run(
            self.recipe,
            self.task.resolution,
            seconds=left.of_run(now.attempts, now.epoch) + left.of_steps(now.attempts),
            per_step=left.per_step,
            on_cores=torch.empty(0, device=self.stepper.device).is_cpu,
        )
        if text:
            self.journal.note(text, "warning")

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Evaluate with the averaged weights, if any, and with the buffers of rank 0, which are the saved ones."""
        ema = self.stepper.ema
        averaged = ema.state_dict()["buffers"].values() if ema is not None else ()
        distributed.broadcast_tensors([*self.model.buffers(), *averaged])
        self.stopping.will_stop(AFTER_BATCH)
        self.beat("evaluating")
        self.is_evaluating = True
        choosing = SampleChooser(self.task)
        with use_ema_weights(ema), self._stop_with_evaluation():
            found = evaluate_model(
                self.task,
                self.model,
                self.val,
                precision=self.parts.choice.precision,
                device=self.stepper.device,
                progress=functools.partial(self._tell_evaluating, epoch),
                left_out=self.sample_reports.add,
                begun=self._begin_evaluating,
                on_outputs=choosing.on_outputs if self.outputs.draws and choosing.judges else None,
                stop=self._is_asked_to_stop,
            )
            self.sample_reports.exchange()
            self.stopping.will_stop(AFTER_PICTURES)
            self.beat("drawing")
            self.outputs.pictures(
                self.task,
                self.model,
                self.val,
                self.parts.choice.precision,
                epoch,
                choosing,
                heading=f", {format_metric_name(self.task.metric)} {found[self.task.metric]:.4f}",
            )
        self.is_evaluating = False
        self.live.last_evaluation.clear()
        self.live.last_evaluation.update(found)
        return found

    @contextmanager
    def _stop_with_evaluation(self) -> Iterator[None]:
        """End the run where the evaluation inside was stopped; the checkpoint of this epoch was taken before it."""
        try:
            yield
        except StopEvaluation:
            self.checkpoints.stopped(self.stopping.asked or "another process", self.planned)

    def _is_asked_to_stop(self) -> bool:
        """Return whether this rank was asked to stop, or another one was; that one is looked for twice a second."""
        if self.stopping.asked is not None:
            self._stop.hoist()
            return True
        now = time.perf_counter()
        if now - self._looked < 0.5:
            return False
        self._looked = now
        return self._stop.is_raised()

    def _begin_evaluating(self, so_far: SoFar) -> None:
        self._so_far = so_far

    def _tell_evaluating(self, epoch: int, done: int, of: int) -> None:
        """Emit progress a few times a second; for display, not for the record."""
        self.beat("evaluating")
        now = time.perf_counter()
        # Each event reads the metrics, which waits for the device: four times a second is cheap.
        if now - self._evaluated > 0.25:
            self._evaluated = now
            # Metrics of several ranks need a collective, and only rank 0 would call it here.
            so_far = self._so_far() if distributed.count_ranks() == 1 else {}
            self.journal.emit(
                events.EVALUATING,
                epoch=epoch,
                done=done,
                total=of,
                metrics=so_far,
                seconds_left=self.time_left.while_evaluating(self.progress.attempts, epoch - 1, done, of),
                seconds_left_in_epoch=self.time_left.of_batches(of - done, done),
            )

    def _judge(self, epoch: int, val: dict[str, float]) -> bool:
        if self.task.metric not in val:
            raise BadData(
                f"the metric {self.task.metric!r} was not measured",
                allowed=", ".join(sorted(val)),
                do=f"set metric of {type(self.task).__name__} to one of these",
            )
        # A task's metric may differ between ranks; the decision to stop early must not.
        # An evaluation of doubtful weights must not become the best one: NaN never is.
        value = float(distributed.broadcast_text("nan" if self.guarding.alarmed else repr(val[self.task.metric])))
        better = self.progress.judge(
            value,
            epoch,
            higher=self.task.higher_is_better,
            margin=self.recipe.evaluate.min_delta,
        )
        self.parts.shape.progress(value if better else None)
        if better:
            self.outputs.best(self.model, self.stepper.ema, epoch, val, self.stepper.weights)
        return better

    @property
    def last_evaluation(self) -> dict[str, float]:
        """The metrics of the last evaluation."""
        return dict(self.live.last_evaluation)

    @property
    def best(self) -> BestEvaluation:
        """The task's metric, its best value and the epoch of it."""
        return {"metric": self.task.metric, "value": self.progress.best, "epoch": self.progress.best_epoch}


def count_planned_steps(recipe: AnyRecipe, per_epoch: int) -> int:
    """Return the number of attempted updates of a whole run."""
    return recipe.train.steps or (recipe.train.epochs or 1) * per_epoch


def _compute_batch_loss(
    task: Task, beat: Beat, progress: RunProgress, metrics: Any, model: nn.Module, batch: Sample
) -> Any:
    beat("computing", progress.attempts)
    return task.loss(model, batch, metrics)
