"""The search of a plan: from strict fp32 over promising settings to a final, in an order that can be interrupted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from halfstep.json_data import JsonResult
from halfstep.measure.batches import count_samples
from halfstep.measure.case import Case
from halfstep.measure.conditions import Conditions
from halfstep.measure.plan.choice import (
    BASELINE_PRECISION,
    SIMPLEST_FIRST,
    PlanCell,
    choose_cell,
    is_fp32,
    is_interval_above,
    sort_by_speed,
)
from halfstep.measure.plan.not_measured import NotMeasuredReason
from halfstep.measure.plan.probe import (
    ENOUGH_RUNS,
    FEWEST_RUNS,
    NUDGE,
    LossParity,
    Noise,
    compare_losses,
    compute_fp32_noise,
)
from halfstep.measure.plan.trials import FINAL_PAIRS, LEAST_FINAL, SettingTrials
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed
from halfstep.measure.worker_process import CandidateFailed, CandidateTooSlow
from halfstep.precision.conversion import eligible_layers, has_torchao
from halfstep.precision.hardware import Device, FormatSupport, find_format_support
from halfstep.precision.names import FP8

SPLITS = 2
"""Maximum number of times a micro-batch is halved or doubled."""


@dataclass(frozen=True)
class CaseFacts:
    """Facts about a case that are needed before measuring."""

    name: str
    now: StepSetting
    """The user's setting, with the actual batch size."""
    has_images: bool
    """Whether a weight has four dimensions, so that channels_last applies."""
    has_batch_norm: bool
    optimizer: str
    learning_rate: float
    fp8_layers: int = 0
    """The linear layers that fp8's kernels can compute; 0 without torchao."""

    @property
    def samples(self) -> int:
        """Return the samples of one update, which a plan does not change."""
        return (self.now.batch or 1) * self.now.microbatches


def collect_case_facts(case: Case) -> CaseFacts:
    """Return the facts about a case. Its optimizer is created to read its type and learning rate."""
    optimizer = case.optimizer(case.model)
    return CaseFacts(
        name=case.name,
        now=replace(case.setting, batch=case.setting.batch or count_samples(case.batch)),
        has_images=any(parameter.dim() == 4 for parameter in case.model.parameters()),
        has_batch_norm=any(isinstance(module, _BatchNorm) for module in case.model.modules()),
        optimizer=type(optimizer).__name__,
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        fp8_layers=sum(bool(row.kind) for row in eligible_layers(case.model, FP8)) if has_torchao() else 0,
    )


def collect_device_abilities(device: Device) -> dict[str, FormatSupport]:
    """Return the device's support of each precision that a run can use, simplest first."""
    return {name: find_format_support(device, name) for name in SIMPLEST_FIRST}


def list_eager_settings(
    baseline: StepSetting, device: Device, has_images: bool, fp8_layers: int = 0
) -> list[StepSetting]:
    """Return all settings but the baseline, most promising first: the likely winner is measured if time runs out."""
    layouts = [True, False] if has_images else [False]
    narrow = ["bf16", "fp16", "tf32", *([FP8] if fp8_layers else [])]
    narrow = [name for name in narrow if find_format_support(device, name).native]
    found = [replace(baseline, precision=name, channels_last=layout) for layout in layouts for name in narrow]
    return found + ([replace(baseline, channels_last=not baseline.channels_last)] if has_images else [])


def iterate_smaller_microbatches(setting: StepSetting) -> Iterator[StepSetting]:
    """Yield the same update in more and smaller micro-batches."""
    batch, pieces = setting.batch or 1, setting.microbatches
    # Micro-batches of unequal size would change the update.
    while batch % 2 == 0:
        batch, pieces = batch // 2, pieces * 2
        yield replace(setting, batch=batch, microbatches=pieces)


def iterate_larger_microbatches(setting: StepSetting) -> Iterator[StepSetting]:
    """Yield the same update in fewer and larger micro-batches."""
    batch, pieces = setting.batch or 1, setting.microbatches
    while pieces % 2 == 0:
        batch, pieces = batch * 2, pieces // 2
        yield replace(setting, batch=batch, microbatches=pieces)


class PlanSearch:
    """The state of a search; `decide` can choose from it at any time."""

    def __init__(self, facts: CaseFacts, device: Device, trials: SettingTrials) -> None:
        self.facts, self.device = facts, device
        self._trials = trials
        self._trials.baseline = replace(facts.now, precision=BASELINE_PRECISION, compile=False)
        self.finalists: list[StepSetting] = []
        self._nudged: list[list[float]] = []

    @property
    def cells(self) -> dict[StepSetting, PlanCell]:
        """Return the cells by setting."""
        return self._trials.cells

    @property
    def baseline(self) -> StepSetting:
        """Return the strict fp32 setting that speeds are measured against."""
        return self._trials.baseline

    @property
    def conditions(self) -> Conditions:
        """Return the conditions of the measurements; empty if none was made."""
        return self._trials.runner.conditions

    @property
    def seconds(self) -> float:
        """Return the seconds spent so far."""
        return self._trials.budget.spent

    def close(self) -> None:
        """Close all candidates."""
        self._trials.runner.close()

    def run(self, final_share: float = 0.9) -> None:
        """Run all phases; the final takes `final_share` of the time left. Ctrl-C propagates; results are kept."""
        self._trials.announce([self.baseline])
        self._trials.measure_baseline(self.facts.name, [self.baseline, *iterate_smaller_microbatches(self.baseline)])
        self.measure_eager()
        self.measure_compiled()
        self.measure_splits()
        self._measure_noise(FEWEST_RUNS)
        self._look_again()
        self.hold_final(final_share)
        self._look_again()

    def decide(self) -> tuple[PlanCell, LossParity]:
        """Return the choice from the results so far. Cells that fail parity are cut, and the next best is considered.

        Where parity cannot be decided, the cell may be chosen, and the plan says so.
        """
        while True:
            cell = self._leader()
            parity = self._parity_of_precision(cell, self.parity_of(cell))
            if parity.verdict != "fails":
                return cell, parity
            self.cells[cell.setting] = replace(cell, cut=f"parity {parity.verdict}: {parity.why}")

    def _parity_of_precision(self, cell: PlanCell, parity: LossParity) -> LossParity:
        """Return the failure of the same narrow precision in another layout, where this cell's parity is undecided."""
        if parity.verdict != "can't tell" or is_fp32(cell):
            return parity
        same = [other for other in self.cells.values() if other.setting.precision == cell.setting.precision]
        failed = [other for other in same if other.speed and self.parity_of(other).verdict == "fails"]
        return LossParity("fails", f"{parity.why}, and {failed[0].setting} fails") if failed else parity

    def parity_of(self, cell: PlanCell) -> LossParity:
        """Return the parity at the baseline's batch, where both have seen the same samples."""
        if cell.setting == self.baseline:
            return LossParity("holds", "strict fp32 was chosen")
        same = replace(cell.setting, batch=self.baseline.batch, microbatches=self.baseline.microbatches)
        if same not in self.cells or self.cells[same].first_step is None:
            return LossParity("can't tell", f"{same} was not measured")
        return compare_losses(
            self.cells[self.baseline].trail, self.cells[same].trail, self._noise, self._trials.judged_after
        )

    @property
    def _noise(self) -> Noise | None:
        return compute_fp32_noise(self.cells[self.baseline].trail, self._nudged, self._trials.judged_after)

    def measure_eager(self) -> None:
        """Measure every eager setting."""
        settings = list_eager_settings(self.baseline, self.device, self.facts.has_images, self.facts.fp8_layers)
        self._trials.announce(settings)
        for setting in settings:
            self._trials.measure(setting)

    def measure_compiled(self) -> None:
        """Measure the fastest two, compiled: the second only if the first did not fail."""
        # Recomputed activations are not compiled.
        if self.baseline.recompute:
            return
        fastest = [replace(cell.setting, compile=True) for cell in sort_by_speed(self.cells.values())[:2]]
        self._trials.announce(fastest)
        for setting in fastest:
            self._trials.measure(setting)
            if self.cells[setting].cut not in ("", NotMeasuredReason.NO_TIME):
                for other in fastest[fastest.index(setting) + 1 :]:
                    self.cells[other] = replace(self.cells[other], cut=NotMeasuredReason.NOT_COMPILED)
                return

    def measure_splits(self) -> None:
        """Measure smaller and larger micro-batches of the fastest, as long as they gain."""
        best = sort_by_speed(self.cells.values())[0]
        for direction in (iterate_smaller_microbatches, iterate_larger_microbatches):
            before = best
            for setting in islice(direction(best.setting), SPLITS):
                self._trials.measure(setting)
                found = self.cells[setting]
                if found.speed is None or before.speed is None or found.speed.speedup <= before.speed.speedup:
                    break
                before = found

    def hold_final(self, share: float) -> None:
        """Race the leader and its strongest rival against strict fp32, for as many pairs as time allows."""
        leader = self._leader()
        ranked = [leader, *sort_by_speed(self.cells.values())]
        rivals = list(dict.fromkeys(cell.setting for cell in ranked if cell.setting != self.baseline))[:2]
        entered = [setting for setting in rivals if self._trials.is_ready(setting)]
        if not entered:
            return
        turn = self._trials.turn(*entered)
        pairs = min(FINAL_PAIRS, int(self._trials.budget.left * share / turn))
        # Too few pairs for two rivals: better an interval for the leader alone than none at all.
        if pairs < LEAST_FINAL:
            entered, turn = entered[:1], self._trials.turn(entered[0])
            pairs = min(FINAL_PAIRS, int(self._trials.budget.left * share / turn))
        if pairs >= LEAST_FINAL:
            self._trials.race(entered, pairs)
            # A leader that could not be opened again stays a finalist with its earlier measurement.
            self.finalists = list(dict.fromkeys([*entered, *rivals[:1]]))

    def measure_larger(self, setting: StepSetting) -> PlanCell:
        """Measure a larger update than the baseline's; it is not added to the table."""
        try:
            self._trials.measure(setting)
            return self.cells[setting]
        finally:
            # Not compared with the others: its update has more samples.
            self._trials.runner.leave(setting)
            self.cells.pop(setting, None)

    def _look_again(self) -> None:
        """Run fp32 more often before a fast cell fails parity, to know its spread better."""
        noise, differences = (
            self._noise,
            [self.parity_of(cell).difference for cell in sort_by_speed(self.cells.values())],
        )
        if noise is not None and any(map(noise.is_too_little_for, differences)):
            self._measure_noise(ENOUGH_RUNS)

    def _measure_noise(self, runs: int) -> None:
        """Run strict fp32 again up to `runs` times, each from slightly perturbed weights."""
        updates = self._trials.judged_after
        if not updates or not any(cell.setting != self.baseline for cell in sort_by_speed(self.cells.values())):
            return
        for seed in range(len(self._nudged) + 1, runs + 1):
            if not self._trials.has_time_for(self.baseline, updates):
                return
            try:
                runner = self._trials.runner
                self._nudged.append(runner.nudged_losses(self.baseline, share=NUDGE, steps=updates, seed=seed))
            except (CandidateFailed, CandidateTooSlow):
                return

    def _leader(self) -> PlanCell:
        fp32 = [cell.speed.speedup for cell in self.cells.values() if is_fp32(cell) and cell.speed and not cell.cut]
        return choose_cell(self._contenders(), fp32=max(fp32, default=1.0), has_batch_norm=self.facts.has_batch_norm)

    def _contenders(self) -> list[PlanCell]:
        """Return the baseline, then the finalists; or all cells if no finalist can be chosen any more."""
        final = [self.cells[setting] for setting in self.finalists if self.cells[setting].can_be_chosen]
        others = final or [cell for setting, cell in self.cells.items() if setting != self.baseline]
        return [self.cells[self.baseline], *others]


FACTORS = (2, 4, 8)
WARM_UP = 500
"""Warm-up updates before a larger learning rate, in a run that is long enough."""
WARM_UP_SHARE = 0.1
"""The largest share of a run that warm-up may take."""
NOTE = "changes the optimization: fewer and larger updates, so accuracy has to be looked at again"


@dataclass(frozen=True)
class BatchGrowth(JsonResult):
    """A larger batch with higher throughput, and the learning rate for it."""

    json_keys: ClassVar[tuple[str, ...]] = (
        "factor", "setting", "speed", "learning_rate", "rule", "warmup_steps", "note", "words"
    )  # fmt: skip
    factor: int
    setting: StepSetting
    speed: Speed
    """Throughput in samples, not updates, relative to strict fp32 at the current batch."""
    learning_rate: float
    rule: str
    warmup_steps: int
    note: str = NOTE

    @property
    def words(self) -> str:
        """Return what it would change, in one line."""
        now = (self.setting.batch or 1) // self.factor
        return (
            f"changes the optimization: batch {now} -> {self.setting.batch}, "
            f"learning rate {self.learning_rate:g}, {self.warmup_steps} updates of warm-up"
        )

    def within(self, updates: int) -> BatchGrowth:
        """Return the same for a run of `updates`, with the warm-up limited to a small part of it."""
        return replace(self, warmup_steps=max(1, min(self.warmup_steps, int(WARM_UP_SHARE * updates))))


class BatchGrowthSearch:
    """The search for a larger batch; its result is kept if it is interrupted."""

    def __init__(self) -> None:
        self.found: BatchGrowth | None = None
        self.ended: str = NotMeasuredReason.INTERRUPTED
        """Why no larger batch was accepted."""

    def run(self, search: PlanSearch, chosen: StepSetting, speed: Speed) -> None:
        """Double the batch while it fits and the throughput rises beyond its interval."""
        best = speed
        for factor in FACTORS:
            setting = replace(chosen, batch=(chosen.batch or 1) * factor)
            cell = search.measure_larger(setting)
            if cell.speed is None or cell.cut:
                self.ended = f"{setting.batch} samples: {cell.cut}"
                return
            by_sample = replace(
                cell.speed,
                speedup=cell.speed.speedup * factor,
                low=cell.speed.low * factor,
                high=cell.speed.high * factor,
            )
            if not is_interval_above(by_sample, best):
                self.ended = f"{setting.batch} samples gained nothing beyond doubt: {by_sample.speedup:.2f}x by samples"
                return
            rate, rule = scale_learning_rate(search.facts.optimizer, search.facts.learning_rate, factor)
            self.found, best = BatchGrowth(factor, setting, by_sample, rate, rule, WARM_UP), by_sample
        self.ended = f"larger ones than {FACTORS[-1]}x were not tried"


def scale_learning_rate(optimizer: str, rate: float, factor: int) -> tuple[float, str]:
    """Return the scaled learning rate and its rule: linear for SGD, square root for adaptive optimizers."""
    if optimizer.lower() == "sgd":
        return _round_rate(rate * factor), f"linear scaling for SGD: {factor}x"
    return _round_rate(rate * math.sqrt(factor)), f"square root scaling for {optimizer}: {math.sqrt(factor):.3g}x"


def _round_rate(rate: float) -> float:
    """Return the learning rate with three digits; more would suggest more accuracy than a rule of thumb has."""
    return float(f"{rate:.3g}")
