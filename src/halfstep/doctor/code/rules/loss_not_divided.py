"""Find gradients that are added up over micro-batches without dividing the loss by their number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import Facts
from halfstep.doctor.code.order import loop_of, own_conditions
from halfstep.doctor.code.script import Script, method, path_of, words_in
from halfstep.doctor.located import LocatedFinding

_COUNT = re.compile(r"accum|micro|update_freq|grad_acc", re.IGNORECASE)
_HARMLESS = frozenset({"print", "int", "max", "min", "len", "range", "str", "ceil", "floor", "info", "add_argument"})
"""Calls that may be given the number of micro-batches without dividing a loss by it."""


def look(facts: Facts) -> Iterator[LocatedFinding]:
    """Yield a finding for every loop whose loss is added up over counted micro-batches, and divided nowhere."""
    script = facts.script
    known: set[ast.AST] = set()
    for call in facts.backwards:
        loop = loop_of(script, call)
        window = _window(facts, call) if loop is not None and loop not in known else None
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


def _window(facts: Facts, backward: ast.Call) -> ast.BinOp | None:
    """Return `index % count` of the condition under which an optimizer steps, once for several backward passes."""
    script, scope = facts.script, facts.script.scopes[backward]
    steps = [one.call for one in facts.scalers.of("step", scope)]
    steps += [call for _, call in facts.optimizer_steps if script.scopes[call] is scope]
    for step in steps:
        if loop_of(script, step) is not loop_of(script, backward):
            continue
        for condition in own_conditions(script, step, backward):
            counted = [node for node in ast.walk(condition.test) if isinstance(node, ast.BinOp)]
            for node in counted:
                named = path_of(node.right) if isinstance(node.op, ast.Mod) else None
                clears = any(method(call) == "zero_grad" for call in ast.walk(condition) if isinstance(call, ast.Call))
                if named is not None and _COUNT.search(named) and clears:
                    return node
    return None


def _may_be_divided(script: Script, backward: ast.Call, window: ast.BinOp) -> bool:
    """Return whether the loss may be divided: by the number itself, by another one, or where this file does not see."""
    loss = _loss(backward)
    if loss is None or path_of(loss) is None or _divides(loss):
        return True
    values = script.bindings(loss)
    if not values or any(value is None or _divides(value) for value in values):
        return True
    name = (path_of(window.right) or "").rpartition(".")[2]
    return _is_used(script, name)


def _loss(backward: ast.Call) -> ast.expr | None:
    """Return the loss of `loss.backward()` and of `scaler.scale(loss).backward()`."""
    node = backward.func.value if isinstance(backward.func, ast.Attribute) else None
    if isinstance(node, ast.Call):
        return node.args[0] if method(node) == "scale" and node.args else None
    return node


def _divides(node: ast.AST) -> bool:
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, (ast.Div, ast.Mult)) for one in ast.walk(node))


def _is_used(script: Script, name: str) -> bool:
    """Return whether a number of this name is divided or multiplied by, or given to code that may do so."""
    for operation in script.each(ast.BinOp, ast.AugAssign):
        if isinstance(operation.op, (ast.Div, ast.Mult, ast.Pow)) and name in words_in(operation):
            return True
    # Functions and methods of this file are looked through themselves.
    own = {function.name for function in script.functions()}
    for call in script.calls():
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        passes = any(name in words_in(one) for one in given) or any(keyword.arg == name for keyword in call.keywords)
        if passes and called not in _HARMLESS and called not in own:
            return True
    return False
