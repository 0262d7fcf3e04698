"""The search: from strict fp32 over what is promising to a final, in an order that can be broken off at any moment."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from halfstep.measure.plan.cell import NO_TIME, Cell
from halfstep.measure.plan.choice import by_speed, choose, is_fp32
from halfstep.measure.plan.probe import NUDGE, Parity, apart, compare
from halfstep.measure.plan.space import SPLITS, Facts, baseline_of, doubled, eager_settings, halved
from halfstep.measure.plan.trials import FINAL_PAIRS, LEAST_FINAL, Trials
from halfstep.measure.process import ArmFailed, ArmTooSlow
from halfstep.measure.setting import Setting
from halfstep.precision.abilities import Device


class Search:
    """What has been found so far; whenever it ends, `decide` makes a choice of it."""

    def __init__(self, facts: Facts, device: Device, trials: Trials) -> None:
        self.facts, self.device = facts, device
        self._trials = trials
        self._trials.baseline = baseline_of(facts.now)
        self.finalists: list[Setting] = []
        self._spread: float | None = None

    @property
    def cells(self) -> dict[Setting, Cell]:
        return self._trials.cells

    @property
    def baseline(self) -> Setting:
        return self._trials.baseline

    @property
    def conditions(self) -> dict[str, Any]:
        return self._trials.arena.conditions

    @property
    def seconds(self) -> float:
        """Spent so far."""
        return self._trials.budget.spent

    def close(self) -> None:
        self._trials.arena.close()

    def run(self, final_share: float = 0.9) -> None:
        """All phases; the final takes that share of the time left. Ctrl-C passes, and what is there stays."""
        self._trials.announce([self.baseline])
        self._trials.measure_baseline(self.facts.name, [self.baseline, *halved(self.baseline)])
        self.measure_eager()
        self.measure_compiled()
        self.measure_splits()
        self._look_again()
        self.hold_final(final_share)
        self._look_again()

    def decide(self) -> tuple[Cell, Parity]:
        """The choice from what there is. Cells that do not keep parity are cut, and the next best is looked at."""
        while True:
            cell = self._leader()
            parity = self.parity_of(cell)
            if parity.verdict == "holds":
                return cell, parity
            self.cells[cell.setting] = replace(cell, cut=f"parity {parity.verdict}: {parity.why}")

    def parity_of(self, cell: Cell) -> Parity:
        """Judged at the batch of the baseline, where both have seen the same samples."""
        if cell.setting == self.baseline:
            return Parity("holds", "it is strict fp32 itself")
        same = replace(cell.setting, batch=self.baseline.batch, microbatches=self.baseline.microbatches)
        trail = self.cells[same].trail if same in self.cells else ()
        return compare(self.cells[self.baseline].trail, trail, self._spread)

    def measure_eager(self) -> None:
        settings = eager_settings(self.baseline, self.device, self.facts.has_images)
        self._trials.announce(settings)
        for setting in settings:
            self._trials.measure(setting)

    def measure_compiled(self) -> None:
        """The fastest two, compiled: the second only where the first did not fail."""
        if self.baseline.recompute:
            return
        fastest = [replace(cell.setting, compile=True) for cell in by_speed(self.cells.values())[:2]]
        self._trials.announce(fastest)
        for setting in fastest:
            self._trials.measure(setting)
            if self.cells[setting].cut not in ("", NO_TIME):
                for other in fastest[fastest.index(setting) + 1 :]:
                    self.cells[other] = replace(self.cells[other], cut="not measured: a faster one did not compile")
                return

    def measure_splits(self) -> None:
        """Smaller and larger micro-batches of the fastest, as long as they gain."""
        best = by_speed(self.cells.values())[0]
        for direction in (halved, doubled):
            before = best
            for setting in islice(direction(best.setting), SPLITS):
                self._trials.measure(setting)
                found = self.cells[setting]
                if found.speed is None or before.speed is None or found.speed.speedup <= before.speed.speedup:
                    break
                before = found

    def hold_final(self, share: float) -> None:
        """The choice so far and its strongest rival, beside strict fp32, for as many pairs as time allows."""
        leader = self._leader()
        ranked = [leader, *by_speed(self.cells.values())]
        rivals = list(dict.fromkeys(cell.setting for cell in ranked if cell.setting != self.baseline))[:2]
        entered = [setting for setting in rivals if self._trials.is_ready(setting)]
        if not entered:
            return
        turn = self._trials.turn(*entered)
        pairs = min(FINAL_PAIRS, int(self._trials.budget.left * share / turn))
        if pairs < LEAST_FINAL:
            entered, turn = entered[:1], self._trials.turn(entered[0])
            pairs = min(FINAL_PAIRS, int(self._trials.budget.left * share / turn))
        if pairs >= LEAST_FINAL:
            self._trials.race(entered, pairs)
            # A leader that could not be opened again stays in the running with what was measured of it before.
            self.finalists = list(dict.fromkeys([*entered, *rivals[:1]]))

    def measure_larger(self, setting: Setting) -> Cell:
        """Another update than the baseline's, measured beside it; it is no cell of the table."""
        try:
            self._trials.measure(setting)
            return self.cells[setting]
        finally:
            self._trials.arena.leave(setting)
            self.cells.pop(setting, None)

    def _look_again(self) -> None:
        """Where the choice lies further from fp32 than the margin, see how far fp32 lies from itself."""
        if self._spread is not None:
            return
        parity = self.parity_of(self._leader())
        if parity.verdict == "fails" and parity.difference is not None:
            try:
                other = self._trials.arena.nudged_losses(self.baseline, share=NUDGE, steps=parity.updates)
            except (ArmFailed, ArmTooSlow):
                return
            if other:
                self._spread = apart(self.cells[self.baseline].trail, other)

    def _leader(self) -> Cell:
        fp32 = [cell.speed.speedup for cell in self.cells.values() if is_fp32(cell) and cell.speed and not cell.cut]
        return choose(self._contenders(), fp32=max(fp32, default=1.0), has_batch_norm=self.facts.has_batch_norm)

    def _contenders(self) -> list[Cell]:
        """The baseline first; then those that were in the final, unless none of them can be chosen any more."""
        final = [self.cells[setting] for setting in self.finalists if self.cells[setting].can_be_chosen]
        others = final or [cell for setting, cell in self.cells.items() if setting != self.baseline]
        return [self.cells[self.baseline], *others]
