"""Find what moves on after a scaler's step whether or not that step was skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import (
    are_mutually_exclusive,
    find_enclosing_loop,
    is_earlier_node,
    iterate_ancestors,
    list_enclosing_conditions,
    list_own_conditions,
)
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.scalers import ScalerCall, can_reach
from halfstep.doctor.code.script import Script, format_variable, has_matching_name, iterate_names

_ASKS = re.compile(r"get_scale|skip|found_inf|stepped|_scale$|^scale|inf$|finite|overflow", re.IGNORECASE)
_JUMPS = (ast.Continue, ast.Return, ast.Break)


class UnheldCall(NamedTuple):
    """A call that moves on regardless, and the step that it follows."""

    call: ast.Call
    step: ScalerCall


def find_unheld_calls(facts: ScriptFacts, calls: list[ast.Call]) -> Iterator[UnheldCall]:
    """Yield the calls that come with a scaler's step in the same loop, and ask nobody whether it was skipped."""
    for call in calls:
        step = _find_step_before(facts, call)
        if step is not None and not _is_held(facts.script, call):
            yield UnheldCall(call, step)


def build_hold_patch(facts: ScriptFacts, found: UnheldCall) -> Patch:
    """Return the patch that makes a call depend on the scale: it falls exactly when a step is skipped."""
    script, patch = facts.script, facts.script.patch()
    update = _find_update_beside(facts, found)
    statement = script.statement(found.call)
    if update is None or not isinstance(statement, ast.Expr):
        patch.spoil()
        return patch
    at, scaler = script.statement(update.call), found.step.scaler
    before = _find_scale_before(script, at, scaler)
    if before is None:
        before = "scale_before"
        patch.insert_before(at, f"{before} = {scaler}.get_scale()")
    # As it is written, with its comment; a statement that shares its line spoils the patch anyway.
    own = script.lines[statement.lineno - 1].strip() if statement.lineno == statement.end_lineno else None
    held = (f"if {scaler}.get_scale() >= {before}:", f"    {own or script.text(statement)}")
    if is_earlier_node(at, statement):
        patch.insert_before(statement, *held)
    else:
        patch.insert_after(at, *held)
    patch.remove(statement)
    return patch


def _find_step_before(facts: ScriptFacts, call: ast.Call) -> ScalerCall | None:
    script, scope = facts.script, facts.script.scopes[call]
    for step in reversed(facts.scalers.of("step", scope)):
        same_loop = find_enclosing_loop(script, step.call) is find_enclosing_loop(script, call)
        # A condition of the step alone, as in accumulation, means another rhythm, which is not judged here.
        apart = list_own_conditions(script, step.call, call)
        after = can_reach(script, step.call, call)
        if not same_loop or not (after or _precedes_step(facts, call, step)) or _may_exclude_step(script, call, step):
            continue
        if all(_is_switch(facts, one, step) for one in apart):
            return None if facts.scalers.is_off(step.call) else step
    return None


def _is_switch(facts: ScriptFacts, condition: ast.If, step: ScalerCall) -> bool:
    """Return whether a condition asks for the scaler, or chooses between its step and the optimizer's own."""
    script = facts.script
    if step.scaler.split(".")[-1] in set(iterate_names(condition.test)):
        return True
    steps = [call for _, call in facts.optimizer_steps if condition in iterate_ancestors(script, call)]
    pairs = (sorted((step.call, call), key=lambda node: (node.lineno, node.col_offset)) for call in steps)
    return any(are_mutually_exclusive(script, first, second) for first, second in pairs)


def _may_exclude_step(script: Script, call: ast.Call, step: ScalerCall) -> bool:
    """Return whether a condition of the call may hold only where the step is not taken: `if not amp`."""
    own = {word for one in list_own_conditions(script, call, step.call) for word in _iterate_switches(one.test)}
    other = {word for one in list_own_conditions(script, step.call, call) for word in _iterate_switches(one.test)}
    return bool(own & other)


def _iterate_switches(test: ast.expr) -> Iterator[str]:
    """Yield the variables of a condition as text: `args.amp`, and neither `args` nor `amp`."""
    inner = {id(node.value) for node in ast.walk(test) if isinstance(node, (ast.Attribute, ast.Subscript))}
    for node in ast.walk(test):
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and id(node) not in inner:
            yield format_variable(node) or ast.unparse(node)


def _precedes_step(facts: ScriptFacts, call: ast.Call, step: ScalerCall) -> bool:
    """Return whether a call stands between the backward pass and the step, so that both come once for each other."""
    script, scope = facts.script, facts.script.scopes[call]
    backwards = [one for one in facts.backwards if script.scopes[one] is scope]
    after_backward = any(can_reach(script, one, call) for one in backwards) or not backwards
    is_own = not list_own_conditions(script, call, step.call)
    return is_own and after_backward and can_reach(script, call, step.call)


def _is_held(script: Script, call: ast.Call) -> bool:
    """Return whether a condition around or before a call asks whether the step was skipped."""
    if any(_can_detect_skip(script, one.test) for one in list_enclosing_conditions(script, call)):
        return True
    scope = script.scopes[call]
    jumps = [one for one in script.each(*_JUMPS) if script.scopes[one] is scope and is_earlier_node(one, call)]
    return any(_can_detect_skip(script, one.test) for jump in jumps for one in list_enclosing_conditions(script, jump))


def _can_detect_skip(script: Script, test: ast.expr) -> bool:
    if has_matching_name(test, _ASKS):
        return True
    names = [node for node in ast.walk(test) if isinstance(node, (ast.Name, ast.Attribute))]
    values = [value for node in names for value in script.bindings(node)]
    return any(value is not None and has_matching_name(value, _ASKS) for value in values)


def _find_update_beside(facts: ScriptFacts, found: UnheldCall) -> ScalerCall | None:
    """Return the scaler's only update, in the same block as the call."""
    script = facts.script
    updates = facts.scalers.of("update", script.scopes[found.call], found.step.scaler)
    home = script.parents[script.statement(found.call)]
    if len(updates) != 1 or script.parents[script.statement(updates[0].call)] is not home:
        return None
    return updates[0]


def _find_scale_before(script: Script, update: ast.stmt, scaler: str) -> str | None:
    """Return the variable that holds the scale before the update, if there is one."""
    for node in script.every(ast.Assign):
        is_scale = isinstance(node.value, ast.Call) and format_variable(node.value.func) == f"{scaler}.get_scale"
        if is_scale and script.parents[node] is script.parents[update] and is_earlier_node(node, update):
            return format_variable(node.targets[0])
    return None
