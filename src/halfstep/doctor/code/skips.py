"""Find what moves on after a scaler's step whether or not that step was skipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.doctor.code.facts import Facts
from halfstep.doctor.code.order import ancestors, conditions, exclusive, loop_of, own_conditions, precedes
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.scalers import ScalerCall, follows
from halfstep.doctor.code.script import Script, mentions, path_of, words_in

_ASKS = re.compile(r"get_scale|skip|found_inf|stepped|_scale$|^scale|inf$|finite|overflow", re.IGNORECASE)
_JUMPS = (ast.Continue, ast.Return, ast.Break)


class Unheld(NamedTuple):
    """A call that moves on regardless, and the step that it follows."""

    call: ast.Call
    step: ScalerCall


def unheld(facts: Facts, calls: list[ast.Call]) -> Iterator[Unheld]:
    """Yield the calls that come with a scaler's step in the same loop, and ask nobody whether it was skipped."""
    for call in calls:
        step = _step_before(facts, call)
        if step is not None and not _is_held(facts.script, call):
            yield Unheld(call, step)


def held_back(facts: Facts, found: Unheld) -> Patch:
    """Return the patch that makes a call depend on the scale: it falls exactly when a step is skipped."""
    script, patch = facts.script, facts.script.patch()
    update = _update_beside(facts, found)
    statement = script.statement(found.call)
    if update is None or not isinstance(statement, ast.Expr):
        patch.spoil()
        return patch
    at, scaler = script.statement(update.call), found.step.scaler
    before = _scale_before(script, at, scaler)
    if before is None:
        before = "scale_before"
        patch.insert_before(at, f"{before} = {scaler}.get_scale()")
    # As it is written, with its comment; a statement that shares its line spoils the patch anyway.
    own = script.lines[statement.lineno - 1].strip() if statement.lineno == statement.end_lineno else None
    held = (f"if {scaler}.get_scale() >= {before}:", f"    {own or script.text(statement)}")
    if precedes(at, statement):
        patch.insert_before(statement, *held)
    else:
        patch.insert_after(at, *held)
    patch.remove(statement)
    return patch


def _step_before(facts: Facts, call: ast.Call) -> ScalerCall | None:
    script, scope = facts.script, facts.script.scopes[call]
    for step in reversed(facts.scalers.of("step", scope)):
        same_loop = loop_of(script, step.call) is loop_of(script, call)
        # A condition of the step alone, as in accumulation, means another rhythm, which is not judged here.
        apart = own_conditions(script, step.call, call)
        after = follows(script, step.call, call)
        if not same_loop or not (after or _precedes_step(facts, call, step)) or _is_chosen_apart(script, call, step):
            continue
        if all(_is_switch(facts, one, step) for one in apart):
            return None if facts.scalers.is_off(step.call) else step
    return None


def _is_switch(facts: Facts, condition: ast.If, step: ScalerCall) -> bool:
    """Return whether a condition asks for the scaler, or chooses between its step and the optimizer's own."""
    script = facts.script
    if step.scaler.split(".")[-1] in set(words_in(condition.test)):
        return True
    steps = [call for _, call in facts.optimizer_steps if condition in ancestors(script, call)]
    pairs = (sorted((step.call, call), key=lambda node: (node.lineno, node.col_offset)) for call in steps)
    return any(exclusive(script, first, second) for first, second in pairs)


def _is_chosen_apart(script: Script, call: ast.Call, step: ScalerCall) -> bool:
    """Return whether a condition of the call may hold only where the step is not taken: `if not amp`."""
    own = {word for one in own_conditions(script, call, step.call) for word in _switches(one.test)}
    other = {word for one in own_conditions(script, step.call, call) for word in _switches(one.test)}
    return bool(own & other)


def _switches(test: ast.expr) -> Iterator[str]:
    """Yield the variables of a condition as text: `args.amp`, and neither `args` nor `amp`."""
    inner = {id(node.value) for node in ast.walk(test) if isinstance(node, (ast.Attribute, ast.Subscript))}
    for node in ast.walk(test):
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and id(node) not in inner:
            yield path_of(node) or ast.unparse(node)


def _precedes_step(facts: Facts, call: ast.Call, step: ScalerCall) -> bool:
    """Return whether a call stands between the backward pass and the step, so that both come once for each other."""
    script, scope = facts.script, facts.script.scopes[call]
    backwards = [one for one in facts.backwards if script.scopes[one] is scope]
    after_backward = any(follows(script, one, call) for one in backwards) or not backwards
    is_own = not own_conditions(script, call, step.call)
    return is_own and after_backward and follows(script, call, step.call)


def _is_held(script: Script, call: ast.Call) -> bool:
    """Return whether a condition around or before a call asks whether the step was skipped."""
    if any(_asks(script, one.test) for one in conditions(script, call)):
        return True
    scope = script.scopes[call]
    jumps = [one for one in script.each(*_JUMPS) if script.scopes[one] is scope and precedes(one, call)]
    return any(_asks(script, one.test) for jump in jumps for one in conditions(script, jump))


def _asks(script: Script, test: ast.expr) -> bool:
    if mentions(test, _ASKS):
        return True
    names = [node for node in ast.walk(test) if isinstance(node, (ast.Name, ast.Attribute))]
    values = [value for node in names for value in script.bindings(node)]
    return any(value is not None and mentions(value, _ASKS) for value in values)


def _update_beside(facts: Facts, found: Unheld) -> ScalerCall | None:
    """Return the scaler's only update, in the same block as the call."""
    script = facts.script
    updates = facts.scalers.of("update", script.scopes[found.call], found.step.scaler)
    home = script.parents[script.statement(found.call)]
    if len(updates) != 1 or script.parents[script.statement(updates[0].call)] is not home:
        return None
    return updates[0]


def _scale_before(script: Script, update: ast.stmt, scaler: str) -> str | None:
    """Return the variable that holds the scale before the update, if there is one."""
    for node in script.every(ast.Assign):
        is_scale = isinstance(node.value, ast.Call) and path_of(node.value.func) == f"{scaler}.get_scale"
        if is_scale and script.parents[node] is script.parents[update] and precedes(node, update):
            return path_of(node.targets[0])
    return None
