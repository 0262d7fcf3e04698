"""Find a backward pass inside autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.autocasts import Autocast
from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import is_earlier_node, iterate_ancestors
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.rules.autocast_round_loop import find_updating_loop
from halfstep.doctor.code.script import format_variable
from halfstep.doctor.located import LocatedFinding

_MAY_LEAVE = {
    "step", "zero_grad", "update", "unscale_", "clip_grad_norm_", "clip_grad_value_", "parameters", "append", "item",
    "print", "detach", "float", "backward", "scale", "get_scale", "cpu", "synchronize", "info", "log", "set_postfix",
    "len", "format", "write", "add_scalar",
}  # fmt: skip
"""Calls that compute nothing in the model, and mean the same outside of autocast."""


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every backward pass that stands inside an autocast, unless the whole loop does."""
    for call in facts.backwards:
        autocast = facts.autocasts.around(call)
        if autocast is None or not autocast.may_be_on or find_updating_loop(facts, autocast) is not None:
            continue
        if _is_off_there(facts, call, autocast):
            continue
        yield facts.script.finding(
            "backward_in_autocast",
            "warning",
            call,
            f"`{facts.script.text(call)[:60]}` runs inside the {autocast}: torch requires the backward pass outside, "
            "where its operations use the formats of the forward pass",
            "end autocast after the loss, and call backward outside of it",
            _move_backward_out(facts, call, autocast),
        )


def _is_off_there(facts: ScriptFacts, call: ast.Call, autocast: Autocast) -> bool:
    """Return whether the call is in the `else` of `if x`, or under `if not x`, inside of `autocast(enabled=x)`."""
    switch = next((ast.unparse(one.value) for one in autocast.call.keywords if one.arg == "enabled"), None)
    inner: ast.AST = call
    for outer in iterate_ancestors(facts.script, call):
        if isinstance(outer, ast.If) and switch is not None:
            test, is_else = ast.unparse(outer.test), inner in outer.orelse
            if (test == switch and is_else) or (test == f"not {switch}" and not is_else):
                return True
        inner = outer
    return False


def _move_backward_out(facts: ScriptFacts, call: ast.Call, autocast: Autocast) -> Patch:
    script, patch = facts.script, facts.script.patch()
    at = script.statement(call)
    outer = script.parents[at]
    if (
        not isinstance(outer, ast.With)
        or at is outer.body[0]
        or autocast.call not in [item.context_expr for item in outer.items]
    ):
        patch.spoil()
        return patch
    leaving = [one for one in outer.body if not is_earlier_node(one, at)]
    if len(outer.items) > 1 or not all(_can_leave_autocast(one) for one in leaving):
        patch.spoil()
    for statement in leaving:
        patch.reindent(statement, patch.indent(outer))
    return patch


def _can_leave_autocast(statement: ast.stmt) -> bool:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {node.func.attr if isinstance(node.func, ast.Attribute) else format_variable(node.func) for node in calls}
    return names <= _MAY_LEAVE
