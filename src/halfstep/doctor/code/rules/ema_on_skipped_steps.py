"""Find a weight average that is updated on steps that the scaler skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import Facts
from halfstep.doctor.code.script import mentions, method, receiver
from halfstep.doctor.code.skips import held_back, unheld
from halfstep.doctor.located import LocatedFinding

AVERAGE = re.compile(r"(^|_)(ema|swa|averaged?)(_|$|model)", re.IGNORECASE)
"""The name of a weight average."""
_NUMBER = re.compile(r"^item$|loss|acc(uracy)?$|metric|time", re.IGNORECASE)
_UPDATES = ("update", "update_parameters", "step")


def look(facts: Facts) -> Iterator[LocatedFinding]:
    """Yield a note for every average that is updated in the loop of a scaler's step, regardless of it."""
    calls = [call for call in facts.script.calls() if _averages(call)] if facts.scalers.of("step") else []
    for found in unheld(facts, calls):
        average = receiver(found.call)
        yield facts.script.finding(
            "ema_on_skipped_steps",
            "note",
            found.call,
            f"`{average}` is also updated when `{found.step.scaler}.step({found.step.optimizer})` of line "
            f"{found.step.call.lineno} was skipped: the same weights are averaged twice",
            f"read the scale before `{found.step.scaler}.update()`, and update `{average}` only if it did not decrease",
            held_back(facts, found),
        )


def _averages(call: ast.Call) -> bool:
    if method(call) not in _UPDATES or not AVERAGE.search((receiver(call) or "").rpartition(".")[2]):
        return False
    # `ema_loss.update(loss.item())` averages a number, not weights.
    return not any(mentions(given, _NUMBER) for given in call.args) and not mentions(call.func, _NUMBER)
