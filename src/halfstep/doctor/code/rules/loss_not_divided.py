"""Find gradients that are added up over micro-batches without dividing the loss by their number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import find_enclosing_loop, list_own_conditions
from halfstep.doctor.code.script import Script, find_method_name, format_variable, iterate_names
from halfstep.doctor.located import LocatedFinding

_COUNT = re.compile(r"accum|micro|update_freq|grad_acc", re.IGNORECASE)
_HARMLESS = frozenset({"print", "int", "max", "min", "len", "range", "str", "ceil", "floor", "info", "add_argument"})
"""Calls that may be given the number of micro-batches without dividing a loss by it."""


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every loop whose loss is added up over counted micro-batches, and divided nowhere."""
    script = facts.script
    known: set[ast.AST] = set()
    for call in facts.backwards:
        loop = find_enclosing_loop(script, call)
        window = _find_window_modulo(facts, call) if loop is not None and loop not in known else None
        if window is None or loop is None or _may_be_divided(script, call, window):
            continue
        known.add(loop)
        count = script.text(window.right)
        yield script.finding(
            "loss_not_divided",
            "note",
            call,
            f"gradients of `{count}` micro-batches are added up, and the loss is not divided by it: they are "
            f"{count} times as large as those of one batch, for the clip and in fp16 as well",
            f"divide the loss by `{count}` before backward, or choose learning rate and clip for the sum",
        )


def _find_window_modulo(facts: ScriptFacts, backward: ast.Call) -> ast.BinOp | None:
    """Return `index % count` of the condition under which an optimizer steps, once for several backward passes."""
    script, scope = facts.script, facts.script.scopes[backward]
    steps = [one.call for one in facts.scalers.of("step", scope)]
    steps += [call for _, call in facts.optimizer_steps if script.scopes[call] is scope]
    for step in steps:
        if find_enclosing_loop(script, step) is not find_enclosing_loop(script, backward):
            continue
        for condition in list_own_conditions(script, step, backward):
            counted = [node for node in ast.walk(condition.test) if isinstance(node, ast.BinOp)]
            for node in counted:
                named = format_variable(node.right) if isinstance(node.op, ast.Mod) else None
                clears = any(
                    find_method_name(call) == "zero_grad" for call in ast.walk(condition) if isinstance(call, ast.Call)
                )
                if named is not None and _COUNT.search(named) and clears:
                    return node
    return None


def _may_be_divided(script: Script, backward: ast.Call, window: ast.BinOp) -> bool:
    """Return whether the loss may be divided: by the number itself, by another one, or where this file does not see."""
    loss = _find_backward_loss(backward)
    if loss is None or format_variable(loss) is None or _has_division(loss):
        return True
    values = script.bindings(loss)
    if not values or any(value is None or _has_division(value) for value in values):
        return True
    name = (format_variable(window.right) or "").rpartition(".")[2]
    return _is_used(script, name)


def _find_backward_loss(backward: ast.Call) -> ast.expr | None:
    """Return the loss of `loss.backward()` and of `scaler.scale(loss).backward()`."""
    node = backward.func.value if isinstance(backward.func, ast.Attribute) else None
    if isinstance(node, ast.Call):
        return node.args[0] if find_method_name(node) == "scale" and node.args else None
    return node


def _has_division(node: ast.AST) -> bool:
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, (ast.Div, ast.Mult)) for one in ast.walk(node))


def _is_used(script: Script, name: str) -> bool:
    """Return whether a number of this name is divided or multiplied by, or given to code that may do so."""
    for operation in script.each(ast.BinOp, ast.AugAssign):
        if isinstance(operation.op, (ast.Div, ast.Mult, ast.Pow)) and name in iterate_names(operation):
            return True
    # Functions and methods of this file are looked through themselves.
    own = {function.name for function in script.functions()}
    for call in script.calls():
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        passes = any(name in iterate_names(one) for one in given) or any(
            keyword.arg == name for keyword in call.keywords
        )
        if passes and called not in _HARMLESS and called not in own:
            return True
    return False
