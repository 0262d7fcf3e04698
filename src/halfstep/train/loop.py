"""Many steps: windows in, reports out; evaluation after every epoch; the best and the last weights on disk."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from halfstep import world
from halfstep.errors import BadData
from halfstep.step.report import GUARD, StepReport
from halfstep.step.window import Window
from halfstep.train.checkpoint.saver import Saver
from halfstep.train.checkpoints import Checkpoints
from halfstep.train.data.loader import TrainLoader, ValLoader
from halfstep.train.data.source import Batch, Sample
from halfstep.train.evaluation import evaluate, values
from halfstep.train.guarding import Guarding
from halfstep.train.journal import journal as events
from halfstep.train.journal.cutting import sizes
from halfstep.train.journal.journal import Journal
from halfstep.train.keeping import Keeper, worn
from halfstep.train.measured import Measured
from halfstep.train.meter import Meter
from halfstep.train.news import News
from halfstep.train.progress import Progress
from halfstep.train.setup import AnyRecipe, Parts
from halfstep.train.state import Live, State
from halfstep.train.stopping import Stopping
from halfstep.train.tally import Tally
from halfstep.train.task import Task

FINISHED, EARLY = "finished", "early_stopping"


class Loop:
    """One run. `run()` trains it to its end; `attempts()` does the same, a step at a time."""

    def __init__(
        self,
        task: Task,
        recipe: AnyRecipe,
        parts: Parts,
        train: TrainLoader,
        val: ValLoader,
        *,
        journal: Journal,
        keeper: Keeper,
        telemetry: Callable[[], dict[str, Any]],
        measured: Measured,
        data: dict[str, Any],
        saver: Saver,
        guarding: Guarding,
        stopping: Stopping,
    ) -> None:
        self.task, self.recipe, self.parts = task, recipe, parts
        self.train, self.val = train, val
        self.journal, self.keeper, self.telemetry = journal, keeper, telemetry
        self.stepper, self.model = parts.stepper, parts.model
        self.meter = Meter()
        self.news = News(journal, recipe.data.bad_samples)
        self.live = Live(
            recipe,
            parts,
            Progress(),
            Tally(task.metrics().to(parts.stepper.device)),
            self.news.budget,
            train.samples,
            measured,
            data,
            {},
            functools.partial(sizes, keeper.folder),
        )
        self.progress, self.tally = self.live.progress, self.live.tally
        self.checkpoints = Checkpoints(self.live, saver, journal)
        self.guarding, self.stopping = guarding, stopping
        guarding.rolled_back = self.checkpoints.set_aside
        self.planned = planned_steps(recipe, train.steps_per_epoch)
        self.epochs = -(-self.planned // train.steps_per_epoch)
        self._measured = functools.partial(_loss, task, self.tally.metrics)
        self._plain = functools.partial(_loss, task, None)
        self._observed, self._evaluated = self.stepper.observed, 0.0

    def run(self) -> str:
        """Train to the end; the reason why it ended."""
        for _ in self.attempts():
            pass
        return EARLY if self._enough() else FINISHED

    def attempts(self) -> Iterator[StepReport]:
        """Every step of the run when it is asked for. An epoch that was begun ends with its evaluation, always."""
        self.model.train()
        self._stop_if_asked(int(self.stopping.asked is not None) if world.size() == 1 else 0)
        # What cannot be saved is found now, and not when hours of work are to be.
        State.of(self.live).snapshot(self.progress.attempts, {})
        while (self.progress.in_epoch or self._left(self.progress.epoch)) and not self._enough():
            yield from self._epoch()

    def _left(self, epochs: int) -> bool:
        """Whether steps are left after so many epochs; their length may have been changed on the way."""
        return self.progress.attempts < self.planned and (epochs < self.epochs or self.recipe.train.steps is not None)

    def _enough(self) -> bool:
        patience = self.recipe.evaluate.patience
        return patience is not None and self.progress.stale >= patience

    # -- one epoch ------------------------------------------------------------------------------------------------

    def _epoch(self) -> Iterator[StepReport]:
        epoch, began, at = self.progress.epoch + 1, time.perf_counter(), self.progress.attempts
        yield from self.steps()
        self.news.share()
        train, skipped, steps = self.tally.values(), dict(self.tally.skipped), self.progress.attempts - at
        seconds = time.perf_counter() - began
        val = self._evaluate(epoch) if self._due(epoch) else None
        is_best = val is not None and self._judge(epoch, val)
        self.progress.epoch, self.progress.in_epoch = epoch, 0
        if not self.guarding.alarmed or self._enough() or not self._left(epoch):  # else the old file is the better one
            self.keeper.last(self.model, self.stepper.ema)
        self.journal.tell(
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
            samples_per_second=steps * self.train.share.window / seconds,
        )

    def _due(self, epoch: int) -> bool:
        return epoch % self.recipe.evaluate.every_epochs == 0 or not self._left(epoch)

    # -- one step -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[StepReport]:
        """The steps that are left of this epoch, each attempted when it is asked for."""
        if self.progress.in_epoch == 0:
            self.tally.reset()
            self.train.samples.quarantined = self.progress.begin_epoch()
        self._began = time.perf_counter(), self.progress.attempts
        self.meter.read()
        if self.progress.attempts >= self.planned:
            return
        for window in self.meter.waiting(self.train.windows(self.progress.epoch, self.progress.in_epoch)):
            report = self._step(self.progress.epoch + 1, window)
            self._after_step()
            yield report
            if self.progress.attempts >= self.planned:
                return

    def _after_step(self) -> None:
        """Between two steps: save where it is due, hear of earlier saves, and stop where that was asked for."""
        ended = self.progress.in_epoch == self.train.steps_per_epoch or self.progress.attempts >= self.planned
        if ended or self.progress.attempts % self.recipe.checkpoint.every_steps == 0:
            self.news.share()
            self.checkpoints.save_unless(self.guarding.alarmed)
        self.checkpoints.hear()
        self._stop_if_asked(self.stepper.hands)

    def _stop_if_asked(self, hands: int) -> None:
        if hands:
            self.news.share()
            self.checkpoints.stop(self.stopping.asked or "another process", self.planned, self.guarding.alarmed)

    def _step(self, epoch: int, window: Sequence[Batch]) -> StepReport:
        lr, due = self.parts.lr, self.progress.in_epoch % self.recipe.run.log_every == 0
        self.stepper.hand = self.stopping.asked is not None
        batches = Window(batch.tensors for batch in window)
        report = self.guarding.step(self._measured if due else self._plain, batches, again=self._plain)
        self.progress.attempts += 1
        self.progress.in_epoch += 1
        self.tally.add(report)
        self.meter.count(self.train.share.window)
        self.news.hear([replaced for batch in window for replaced in batch.replaced])
        more = {} if report.applied else self._skipped(report, window)
        self.journal.tell(
            events.STEP,
            epoch=epoch,
            in_epoch=self.progress.in_epoch,
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
        self.guarding.heed(report, more.get("quarantined", ()))
        self._tell_observed()
        if due:
            self._tell_speed()
        return report

    def _skipped(self, report: StepReport, window: Sequence[Batch]) -> dict[str, Any]:
        """The samples of a skipped step; those that are not finite themselves are not used in the next epochs."""
        ids, guilty = self.news.suspects(window)
        if guilty and not (report.reason or "").startswith(GUARD):
            self.progress.suspected = sorted({*self.progress.suspected, *guilty})
        return {"ids": ids, "quarantined": guilty}

    def _tell_observed(self) -> None:
        """Once for each precision: a guard may change it on the way."""
        seen = self.stepper.observed
        if seen is not None and seen is not self._observed:
            self._observed = seen
            self.journal.tell(events.OBSERVED, expected=seen.expected, share=seen.share, text=str(seen))

    def _tell_speed(self) -> None:
        self.news.share()
        rate, waiting = self.meter.read()
        began, at = self._began
        per_step = (time.perf_counter() - began) / (self.progress.attempts - at)
        self.journal.tell(
            events.SPEED,
            samples_per_second=rate,
            wait_share=waiting,
            seconds_left=per_step * (self.planned - self.progress.attempts),
            train_metrics=values(self.tally.metrics) if world.size() == 1 else {},  # rank 0 alone would read them
            meters=self.guarding.readings,
            **self.telemetry(),
        )

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """With the averaged weights where there are any, and with rank 0's buffers, which are the saved ones."""
        ema = self.stepper.ema
        averaged = ema.state_dict()["buffers"].values() if ema is not None else ()
        world.take_from_rank_zero([*self.model.buffers(), *averaged])
        with worn(ema):
            found = evaluate(
                self.task,
                self.model,
                self.val,
                precision=self.parts.choice.precision,
                device=self.stepper.device,
                progress=functools.partial(self._tell_evaluating, epoch),
                left_out=self.news.hear,
            )
            self.news.share()
            self.keeper.pictures(self.task, self.model, self.val, self.parts.choice.precision, epoch)
        self.live.latest.clear()
        self.live.latest.update(found)
        return found

    def _tell_evaluating(self, epoch: int, done: int, of: int) -> None:
        """A few times a second: for the eye, not for the record. The checkpoint was taken before the evaluation."""
        if self.stopping.asked is not None and world.size() == 1:
            self.checkpoints.stopped(self.stopping.asked, self.planned)
        now = time.perf_counter()
        if now - self._evaluated > 0.25:
            self._evaluated = now
            self.journal.tell(events.EVALUATING, epoch=epoch, done=done, of=of)

    def _judge(self, epoch: int, val: dict[str, float]) -> bool:
        if self.task.metric not in val:
            raise BadData(
                f"the metric {self.task.metric!r} is not among what was measured",
                allowed=", ".join(sorted(val)),
                do=f"set metric of {type(self.task).__name__} to one of these",
            )
        # A task's metric may differ between processes; whether to go on must not.
        value = float(world.from_rank_zero("nan" if self.guarding.alarmed else repr(val[self.task.metric])))
        better = self.progress.judge(
            value,
            epoch,
            higher=self.task.higher_is_better,
            margin=self.recipe.evaluate.min_delta,
        )
        self.parts.shape.progress(value if better else None)
        if better:
            self.keeper.best(self.model, self.stepper.ema, epoch, val)
        return better

    @property
    def latest(self) -> dict[str, float]:
        """The metrics of the last evaluation."""
        return dict(self.live.latest)

    @property
    def best(self) -> dict[str, Any]:
        return {"metric": self.task.metric, "value": self.progress.best, "epoch": self.progress.best_epoch}


def planned_steps(recipe: AnyRecipe, per_epoch: int) -> int:
    """Attempted updates of a whole run."""
    return recipe.train.steps or (recipe.train.epochs or 1) * per_epoch


def _loss(task: Task, metrics: Any, model: nn.Module, batch: Sample) -> Any:
    return task.loss(model, batch, metrics)
