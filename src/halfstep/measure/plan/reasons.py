"""Why each part of a choice is as it is: the same setting with that one part changed, beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from halfstep.measure.plan.cell import BASELINE_PRECISION, Cell
from halfstep.measure.plan.choice import interval, is_fp32, why_stay
from halfstep.measure.plan.space import Facts
from halfstep.measure.setting import Setting

Cells = Mapping[Setting, Cell]


def reasons(choice: Cell, baseline: Setting, cells: Cells, facts: Facts) -> dict[str, str]:
    """A sentence for each part, with what was measured."""
    found = {"precision": _precision(choice, baseline, cells)}
    if facts.has_images:
        other = replace(choice.setting, channels_last=not choice.setting.channels_last)
        layouts = ("channels last", "plain") if choice.setting.channels_last else ("plain", "channels last")
        found["layout"] = f"{layouts[0]} {words(choice, baseline)}; {layouts[1]} {words(cells.get(other), baseline)}"
    found["compile"] = _compile(choice, baseline, cells)
    found["micro-batches"] = _splits(choice, baseline, cells, facts)
    return found


def words(cell: Cell | None, baseline: Setting) -> str:
    """How fast a cell is, or why nobody knows."""
    if cell is None:
        return "(not measured)"
    if cell.speed is None:
        return f"({cell.cut})"
    speed = cell.speed
    text = f"{speed.speedup:.2f}x"
    if cell.setting != baseline:
        text += f" ({interval(speed)})"
    return f"{text}, cut ({cell.cut})" if cell.cut else text


def _precision(choice: Cell, baseline: Setting, cells: Cells) -> str:
    if is_fp32(choice):
        return f"stay in fp32: {why_stay(choice, cells.values())}"
    same = cells.get(replace(choice.setting, precision=BASELINE_PRECISION))
    beside = (
        f"; fp32 laid out the same way {words(same, baseline)}"
        if same and same.speed and same.setting != baseline
        else ""
    )
    return f"{choice.setting.precision} {words(choice, baseline)} as fast as strict fp32{beside}"


def _compile(choice: Cell, baseline: Setting, cells: Cells) -> str:
    other = cells.get(replace(choice.setting, compile=not choice.setting.compile))
    if choice.setting.compile:
        took = f", first step {choice.first_step:.0f} s" if choice.first_step else ""
        return f"compiled {words(choice, baseline)}{took}; eager {words(other, baseline)}"
    took = f", first step {other.first_step:.0f} s" if other and other.first_step else ""
    if choice.setting.recompute:
        return "eager: activations that are computed again are not compiled"
    return f"eager {words(choice, baseline)}; compiled {words(other, baseline)}{took}"


def _splits(choice: Cell, baseline: Setting, cells: Cells, facts: Facts) -> str:
    setting = choice.setting
    same = [
        cell
        for other, cell in cells.items()
        if other != setting and replace(other, batch=setting.batch, microbatches=setting.microbatches) == setting
    ]
    text = "; ".join(f"{split(cell.setting)} {words(cell, baseline)}" for cell in (choice, *same))
    if baseline.batch != facts.now.batch:
        text += f"; {split(facts.now)} does not fit in fp32"
    if facts.has_batch_norm and setting.batch != facts.now.batch:
        text += "; batch normalisation averages over a micro-batch, so this changes it"
    return text


def split(setting: Setting) -> str:
    return f"{setting.microbatches} × {setting.batch}"
