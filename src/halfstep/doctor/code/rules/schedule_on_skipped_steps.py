"""Find a learning rate schedule that advances on steps that the scaler skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.script import find_method_name, find_receiver
from halfstep.doctor.code.skips import build_hold_patch, find_unheld_calls
from halfstep.doctor.located import LocatedFinding

_SCHEDULE = re.compile(r"sched", re.IGNORECASE)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every schedule that is stepped in the loop of a scaler's step, regardless of it."""
    calls = (
        [call for call in facts.script.calls() if _is_scheduler_step(facts, call)] if facts.scalers.of("step") else []
    )
    for found in find_unheld_calls(facts, calls):
        schedule = find_receiver(found.call)
        yield facts.script.finding(
            "schedule_on_skipped_steps",
            "warning",
            found.call,
            f"`{schedule}` advances even when `{found.step.scaler}.step({found.step.optimizer})` in line "
            f"{found.step.call.lineno} is skipped: after an overflow the learning rate changes, but the weights do not",
            f"save `{found.step.scaler}.get_scale()` before `{found.step.scaler}.update()`, and call "
            f"`{schedule}.step()` only if the scale has not decreased",
            build_hold_patch(facts, found),
        )


def _is_scheduler_step(facts: ScriptFacts, call: ast.Call) -> bool:
    # A noise schedule's step takes the model's output: that of a learning rate takes nothing.
    if find_method_name(call) != "step" or call.args or call.keywords or not isinstance(call.func, ast.Attribute):
        return False
    made = [one for one in facts.script.bindings(call.func.value) if isinstance(one, ast.Call)]
    names = [name for one in made for name in facts.script.names(one.func)]
    if any(name.startswith("torch.optim.lr_scheduler.") for name in names):
        return True
    return bool(_SCHEDULE.search((find_receiver(call) or "").rpartition(".")[2]))
