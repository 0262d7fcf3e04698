"""Plan: choose the fastest setting for a model on this device that fits and trains as fp32 does, by measuring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfstep.errors import WrongUse
from halfstep.measure.case import Case, LossFunction
from halfstep.measure.conditions import collect_conditions
from halfstep.measure.local_candidate import create_candidate
from halfstep.measure.plan.choice import (
    BASELINE_PRECISION,
    LadderCell,
    PlanCell,
    explain_staying_in_fp32,
    find_runner_up,
    format_speed_interval,
    is_fp32,
    rank_setting_simplicity,
)
from halfstep.measure.plan.page import Plan
from halfstep.measure.plan.race import MemoryFit, Race, TimeBudget, find_free_memory
from halfstep.measure.plan.search import (
    BatchGrowthSearch,
    CaseFacts,
    PlanSearch,
    collect_case_facts,
    collect_device_abilities,
)
from halfstep.measure.plan.trials import SettingTrials
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Measurable, Settings, resolve_subject
from halfstep.numbers import format_counted_noun
from halfstep.precision.hardware import Device, describe_device
from halfstep.precision.names import FP8
from halfstep.random_state import preserve_random_state
from halfstep.status_line import OnProgress

Cells = Mapping[StepSetting, PlanCell]


def explain_choice(choice: PlanCell, baseline: StepSetting, cells: Cells, facts: CaseFacts) -> dict[str, str]:
    """Return a sentence for each part, with its measurements; for fp32, why the precision stays."""
    found = {"precision": _explain_precision(choice, baseline, cells)}
    if facts.has_images:
        other = replace(choice.setting, channels_last=not choice.setting.channels_last)
        layouts = ("channels last", "contiguous") if choice.setting.channels_last else ("contiguous", "channels last")
        found["layout"] = (
            f"{layouts[0]} {describe_cell_speed(choice, baseline)}; {layouts[1]} "
            f"{describe_cell_speed(cells.get(other), baseline)}"
        )
    if (narrow := cells.get(replace(baseline, precision=FP8))) is not None:
        found[FP8] = (
            f"eligible: {format_counted_noun(facts.fp8_layers, 'linear layer')}; "
            f"{describe_cell_speed(narrow, baseline)}"
        )
    found["compile"] = _explain_compilation(choice, baseline, cells)
    found["micro-batches"] = _explain_microbatches(choice, baseline, cells, facts)
    return found


def describe_cell_speed(cell: PlanCell | None, baseline: StepSetting) -> str:
    """Return the speed of a cell as text, or why there is none."""
    if cell is None:
        return "(not measured)"
    if cell.speed is None:
        return f"({cell.cut})"
    speed = cell.speed
    text = f"{speed.speedup:.2f}x"
    if cell.setting != baseline:
        text += f" ({format_speed_interval(speed)})"
    return f"{text}, cut ({cell.cut})" if cell.cut else text


def _explain_precision(choice: PlanCell, baseline: StepSetting, cells: Cells) -> str:
    if is_fp32(choice):
        return explain_staying_in_fp32(choice, cells.values())
    same = cells.get(replace(choice.setting, precision=BASELINE_PRECISION))
    beside = (
        f"; fp32 laid out the same way {describe_cell_speed(same, baseline)}"
        if same and same.speed and same.setting != baseline
        else ""
    )
    return f"{choice.setting.precision} {describe_cell_speed(choice, baseline)} as fast as strict fp32{beside}"


def _explain_compilation(choice: PlanCell, baseline: StepSetting, cells: Cells) -> str:
    other = cells.get(replace(choice.setting, compile=not choice.setting.compile))
    if choice.setting.compile:
        took = f", first step {choice.first_step:.0f} s" if choice.first_step else ""
        return f"compiled {describe_cell_speed(choice, baseline)}{took}; eager {describe_cell_speed(other, baseline)}"
    took = f", first step {other.first_step:.0f} s" if other and other.first_step else ""
    if choice.setting.recompute:
        return "eager: activations that are computed again are not compiled"
    return f"eager {describe_cell_speed(choice, baseline)}; compiled {describe_cell_speed(other, baseline)}{took}"


def _explain_microbatches(choice: PlanCell, baseline: StepSetting, cells: Cells, facts: CaseFacts) -> str:
    setting = choice.setting
    same = [
        cell
        for other, cell in cells.items()
        if other != setting and replace(other, batch=setting.batch, microbatches=setting.microbatches) == setting
    ]
    text = "; ".join(
        f"{format_microbatches(cell.setting)} {describe_cell_speed(cell, baseline)}" for cell in (choice, *same)
    )
    if baseline.batch != facts.now.batch:
        text += f"; {format_microbatches(facts.now)} does not fit in fp32"
    if facts.has_batch_norm and setting.batch != facts.now.batch:
        text += "; batch normalization averages over a micro-batch, so this changes it"
    return text


def format_microbatches(setting: StepSetting) -> str:
    """Return the micro-batches and their size as text."""
    return f"{setting.microbatches} × {setting.batch}"


SECONDS = 180.0
ELSEWHERE, HERE = "each setting in a separate process", "all settings in this process"


def plan(
    subject: Measurable,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    settings: Settings = (),
    seconds: float = SECONDS,
    device: str | None = None,
    grow_batch: bool = False,
    progress: OnProgress | None = None,
) -> Plan:
    """Choose the fastest setting for a model, a case or a recipe by measuring candidates.

    Candidates of a case or a recipe run in separate processes.

    Args:
        subject: A model, "module:callable", or a recipe by name or path.
        loss_fn: `loss_fn(model, batch)`, for a model.
        batch: A batch, for a model.
        settings: Settings that change the recipe.
        seconds: The time limit.
        device: The device; by default the best of this machine.
        grow_batch: Also try larger batches.
        progress: A callback that gets the seconds spent and the limit.

    Returns:
        The plan: the chosen setting, and the measurements of all candidates.

    Raises:
        WrongUse: The time is invalid, an argument is missing, or the case does not train or fit in strict fp32.
    """
    if not 0 < seconds < math.inf:
        raise WrongUse(
            f"{seconds} seconds for a plan",
            allowed="a number of seconds above 0, and not without end",
            do=f"give --seconds {SECONDS:.0f}",
        )
    budget = TimeBudget(seconds)
    here = describe_device(device)
    measured = resolve_subject(subject, loss_fn, batch, settings)
    case = measured.open()
    facts = collect_case_facts(case)
    room = MemoryFit(find_free_memory(torch.device(here.place)), partial(_predict_peak, case, here))
    runner = Race(
        partial(create_candidate, measured, device=device), budget, partial(_report_progress, budget, progress)
    )
    where = HERE if isinstance(measured, Case) else ELSEWHERE
    search = PlanSearch(facts, here, SettingTrials(runner, budget, room))
    # A model may be built again when it is copied.
    with preserve_random_state():
        return run_plan_search(search, where, grow_batch=grow_batch)


def run_plan_search(search: PlanSearch, where: str, *, grow_batch: bool = False) -> Plan:
    """Search until the time is up or Ctrl-C, and choose from the results so far."""
    interrupted, growing = False, BatchGrowthSearch()
    try:
        # Growing comes after the final and needs extra time.
        search.run(final_share=0.5 if grow_batch else 0.9)
        leader, _ = search.decide()
        if grow_batch and leader.speed is not None:
            growing.run(search, leader.setting, leader.speed)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        search.close()
    # Decided again, because Ctrl-C may have come before the first decision.
    choice, parity = search.decide()
    cells = sorted(
        search.cells.values(), key=lambda cell: (rank_setting_simplicity(cell.setting), cell.setting.batch or 0)
    )
    second, why_not = find_runner_up(choice, cells)
    return Plan(
        name=search.facts.name,
        device=search.device,
        formats=collect_device_abilities(search.device),
        now=search.facts.now,
        baseline=search.baseline,
        choice=choice,
        stay=is_fp32(choice),
        reasons=explain_choice(choice, search.baseline, search.cells, search.facts),
        parity=parity,
        ladder=tuple(
            LadderCell(**vars(cell), parity=search.parity_of(cell) if cell.speed is not None else None)
            for cell in cells
        ),
        runner_up=second,
        why_not=why_not,
        growth=growing.found,
        growth_ended=growing.ended if grow_batch else "",
        # Empty if Ctrl-C came before any candidate was open.
        conditions={**(search.conditions or collect_conditions(search.device.place)), "arms": where},
        seconds=round(search.seconds, 1),
        interrupted=interrupted,
    )


def _predict_peak(case: Case, device: Device, setting: StepSetting) -> int:
    from halfstep.measure.memory.estimate import estimate_ledger

    return estimate_ledger(lambda: case, setting, device.place).peak


def _report_progress(budget: TimeBudget, progress: OnProgress | None) -> None:
    if progress is not None:
        progress(min(int(budget.spent), int(budget.seconds)), int(budget.seconds))
