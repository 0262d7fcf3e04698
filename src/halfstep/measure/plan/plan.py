"""`plan`: the fastest setting for a model on this device that fits and trains as fp32 does, chosen by measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from halfstep.errors import WrongUse
from halfstep.measure.case import Case, LossFunction, Subject, case_of
from halfstep.measure.conditions import conditions
from halfstep.measure.plan.apply import python_lines, recipe_changes
from halfstep.measure.plan.arena import Arena
from halfstep.measure.plan.arms import ArmHere, MakeArm, observes
from halfstep.measure.plan.budget import Budget
from halfstep.measure.plan.cell import Cell, simplicity
from halfstep.measure.plan.choice import is_fp32, runner_up
from halfstep.measure.plan.growth import Growing, Growth
from halfstep.measure.plan.probe import Parity
from halfstep.measure.plan.reasons import reasons
from halfstep.measure.plan.room import Room, free_bytes
from halfstep.measure.plan.search import Search
from halfstep.measure.plan.space import abilities, facts_of
from halfstep.measure.plan.trials import Trials
from halfstep.measure.process import ArmProcess
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Progress
from halfstep.precision.abilities import Device
from halfstep.precision.hardware import describe

SECONDS = 180.0
ELSEWHERE, HERE = "each arm in a process of its own", "all arms in this process"


@dataclass(frozen=True)
class Plan:
    """What was chosen, and everything that led to it."""

    name: str
    device: Device
    now: Setting
    """As the person runs it."""
    baseline: Setting
    """Strict fp32, which every speed is measured against."""
    choice: Cell
    stay: bool
    """Precision stays fp32: nothing narrower was worth it here."""
    reasons: dict[str, str]
    """Of each part of the choice."""
    parity: Parity
    ladder: tuple[Cell, ...]
    """All cells, simplest first."""
    runner_up: Cell | None
    why_not: str
    growth: Growth | None
    growth_ended: str
    """Why no larger batch was taken; empty where none was asked for."""
    conditions: dict[str, Any]
    seconds: float
    interrupted: bool

    @property
    def changes(self) -> dict[str, Any]:
        """Settings of a recipe."""
        return recipe_changes(self.choice.setting, self.growth)

    @property
    def python(self) -> list[str]:
        """Lines of Python."""
        return python_lines(self.choice.setting, self.growth)

    def as_dict(self) -> dict[str, Any]:
        can = abilities(self.device)
        return {
            "name": self.name,
            "device": {"name": self.device.name, "place": self.device.place},
            "formats": {name: {"native": found.native, "reason": found.reason} for name, found in can.items()},
            "now": self.now.as_dict(),
            "baseline": self.baseline.as_dict(),
            "choice": self.choice.as_dict(),
            "stay": self.stay,
            "reasons": self.reasons,
            "parity": self.parity.as_dict(),
            "ladder": [cell.as_dict() for cell in self.ladder],
            "runner_up": self.runner_up.as_dict() if self.runner_up else None,
            "why_not": self.why_not,
            "growth": self.growth.as_dict() if self.growth else None,
            "growth_ended": self.growth_ended,
            "changes": self.changes,
            "python": self.python,
            "conditions": self.conditions,
            "seconds": round(self.seconds, 1),
            "interrupted": self.interrupted,
        }


def plan(
    model_or_subject: nn.Module | Subject | str,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    seconds: float = SECONDS,
    device: str | None = None,
    grow_batch: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Choose for a model, its loss and a batch; or for a RECIPE or `module:callable`, whose arms have processes of
    their own. `progress` is told the seconds spent, and those that there are."""
    if not 0 < seconds < math.inf:
        raise WrongUse(
            f"{seconds} seconds for a plan",
            allowed="a number of seconds above 0, and not without end",
            do=f"give --seconds {SECONDS:.0f}",
        )
    budget = Budget(seconds)
    here = describe(device)
    where, case, make_arm = _opened(model_or_subject, loss_fn, batch, device)
    facts = facts_of(case)
    room = Room(free_bytes(torch.device(here.place)), partial(_predicted_peak, case, here))
    arena = Arena(make_arm, budget, partial(_tell, budget, progress))
    return search_and_decide(Search(facts, here, Trials(arena, budget, room)), where, grow_batch=grow_batch)


def search_and_decide(search: Search, where: str, *, grow_batch: bool = False) -> Plan:
    """Search until the time is up or Ctrl-C comes, and make the best of what was found."""
    interrupted, growing = False, Growing()
    try:
        search.run(final_share=0.5 if grow_batch else 0.9)
        leader, _ = search.decide()
        if grow_batch and leader.speed is not None:
            growing.run(search, leader.setting, leader.speed)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        search.close()
    choice, parity = search.decide()
    cells = sorted(search.cells.values(), key=lambda cell: (simplicity(cell.setting), cell.setting.batch or 0))
    second, why_not = runner_up(choice, cells)
    return Plan(
        name=search.facts.name,
        device=search.device,
        now=search.facts.now,
        baseline=search.baseline,
        choice=choice,
        stay=is_fp32(choice),
        reasons=reasons(choice, search.baseline, search.cells, search.facts),
        parity=parity,
        ladder=tuple(cells),
        runner_up=second,
        why_not=why_not,
        growth=growing.found,
        growth_ended=growing.ended if grow_batch else "",
        conditions={**(search.conditions or conditions(search.device.place)), "arms": where},
        seconds=search.seconds,
        interrupted=interrupted,
    )


def _opened(
    given: nn.Module | Subject | str, loss_fn: LossFunction | None, batch: Any, device: str | None
) -> tuple[str, Case, MakeArm]:
    """The case, and how arms are made: the only difference between a person's objects and a subject."""
    if isinstance(given, nn.Module):
        if loss_fn is None or batch is None:
            raise WrongUse(
                "a model without a loss_fn or a batch", allowed="plan(model, loss_fn, batch)", do="give all three"
            )
        case = case_of(given, loss_fn, batch)
        return HERE, case, lambda setting: ArmHere(case, setting, device)
    subject = given if isinstance(given, Subject) else Subject(given)
    return ELSEWHERE, subject.open(), lambda setting: ArmProcess(subject, setting, device, observe=observes(setting))


def _predicted_peak(case: Case, device: Device, setting: Setting) -> int:
    from halfstep.measure.memory.estimate import ledger_of

    return ledger_of(lambda: case, setting, device.place).peak


def _tell(budget: Budget, progress: Progress | None) -> None:
    if progress is not None:
        progress(min(int(budget.spent), int(budget.seconds)), int(budget.seconds))
