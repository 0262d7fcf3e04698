"""Find an optimizer that is stepped by the scaler and once more by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import find_enclosing_loop, iterate_ancestors, list_own_conditions
from halfstep.doctor.code.scalers import ScalerCall, can_reach
from halfstep.doctor.code.script import format_variable, iterate_names
from halfstep.doctor.located import LocatedFinding

_SWITCH = re.compile(r"amp|scal|fp16|half|mixed|precision|cuda", re.IGNORECASE)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every `optimizer.step()` that one pass reaches together with the scaler's step of it."""
    for path, call in facts.optimizer_steps:
        step = _find_scaled_step(facts, path, call)
        if step is None:
            continue
        patch = facts.script.patch()
        patch.remove(facts.script.statement(call))
        yield facts.script.finding(
            "optimizer_step_beside_scaler",
            "error",
            call,
            f"`{path}.step()` besides `{step.scaler}.step({step.optimizer})` of line {step.call.lineno}: it steps "
            "a second time, even with gradients that the scaler found to be infinite",
            f"remove `{path}.step()`: `{step.scaler}.step({step.optimizer})` calls it",
            patch,
        )


def _find_scaled_step(facts: ScriptFacts, path: str, call: ast.Call) -> ScalerCall | None:
    script, scope = facts.script, facts.script.scopes[call]
    for step in facts.scalers.of("step", scope):
        reached = can_reach(script, step.call, call) or can_reach(script, call, step.call)
        if not reached or facts.scalers.is_off(step.call) or _is_switched(facts, step.call, call):
            continue
        if step.optimizer == path and find_enclosing_loop(script, step.call) is find_enclosing_loop(script, call):
            return step
        if _find_optimizer_container(facts, step) == path.partition("[")[0] != path:
            return step
    return None


def _is_switched(facts: ScriptFacts, one: ast.AST, other: ast.AST) -> bool:
    """Return whether a condition may choose between the two."""
    tests = [list_own_conditions(facts.script, one, other), list_own_conditions(facts.script, other, one)]
    words = [{word for found in side for word in iterate_names(found.test)} for side in tests]
    return bool(words[0] & words[1]) or any(_SWITCH.search(word) for side in words for word in side)


def _find_optimizer_container(facts: ScriptFacts, step: ScalerCall) -> str | None:
    """Return `optimizers` where the step is in a loop over `optimizers.values()` or `.items()`."""
    for loop in iterate_ancestors(facts.script, step.call):
        if isinstance(loop, ast.For) and step.optimizer in {format_variable(node) for node in ast.walk(loop.target)}:
            over = loop.iter
            if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr in _VIEWS:
                over = over.func.value
            return format_variable(over)
    return None


_VIEWS = ("values", "items")
