"""Find a weight average that is updated on steps that the scaler skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.script import find_method_name, find_receiver, has_matching_name
from halfstep.doctor.code.skips import build_hold_patch, find_unheld_calls
from halfstep.doctor.located import LocatedFinding

AVERAGE = re.compile(r"(^|_)(ema|swa|averaged?)(_|$|model)", re.IGNORECASE)
"""The name of a weight average."""
_NUMBER = re.compile(r"^item$|loss|acc(uracy)?$|metric|time", re.IGNORECASE)
_UPDATES = ("update", "update_parameters", "step")


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a note for every average that is updated in the loop of a scaler's step, regardless of it."""
    calls = [call for call in facts.script.calls() if _is_average_update(call)] if facts.scalers.of("step") else []
    for found in find_unheld_calls(facts, calls):
        average = find_receiver(found.call)
        yield facts.script.finding(
            "ema_on_skipped_steps",
            "note",
            found.call,
            f"`{average}` is also updated when `{found.step.scaler}.step({found.step.optimizer})` of line "
            f"{found.step.call.lineno} was skipped: the same weights are averaged twice",
            f"read the scale before `{found.step.scaler}.update()`, and update `{average}` only if it did not decrease",
            build_hold_patch(facts, found),
        )


def _is_average_update(call: ast.Call) -> bool:
    if find_method_name(call) not in _UPDATES or not AVERAGE.search((find_receiver(call) or "").rpartition(".")[2]):
        return False
    # `ema_loss.update(loss.item())` averages a number, not weights.
    return not any(has_matching_name(given, _NUMBER) for given in call.args) and not has_matching_name(
        call.func, _NUMBER
    )
