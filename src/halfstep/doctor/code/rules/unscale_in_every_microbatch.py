"""Find gradients that are unscaled at every micro-batch of an accumulation window."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import find_enclosing_loop, is_earlier_node, iterate_ancestors, list_own_conditions
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.scalers import ScalerCall, can_reach
from halfstep.doctor.code.script import Script, has_matching_name
from halfstep.doctor.located import LocatedFinding

_WINDOW = re.compile(r"accum|sync_grad|micro|window", re.IGNORECASE)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every `unscale_` outside of the branch in which the scaler steps once a window."""
    script = facts.script
    for unscale in facts.scalers.of("unscale"):
        for step in facts.scalers.of("step", script.scopes[unscale.call], unscale.scaler):
            window = _find_window_condition(script, step, unscale)
            same = step.optimizer == unscale.optimizer and find_enclosing_loop(
                script, step.call
            ) is find_enclosing_loop(script, unscale.call)
            if (
                window is None
                or not same
                or find_enclosing_loop(script, step.call) is None
                or facts.scalers.is_off(step.call)
            ):
                continue
            yield script.finding(
                "unscale_in_every_microbatch",
                "error",
                unscale.call,
                f"`{unscale.scaler}.unscale_({unscale.optimizer})` runs at every micro-batch, and the step only under "
                f"`if {script.text(window.test)[:60]}` of line {window.lineno}: the second one of a window raises, or "
                "divides the accumulated gradients by the scale again",
                f"move `{unscale.scaler}.unscale_({unscale.optimizer})` into that branch, before the step",
                _move_unscale(facts, unscale, step, window),
            )
            break


def _find_window_condition(script: Script, step: ScalerCall, unscale: ScalerCall) -> ast.If | None:
    """Return the condition that holds once a window, around the step and not around the unscaling."""
    mine = {script.text(one.test) for one in list_own_conditions(script, unscale.call, step.call)}
    # `if amp` around the unscaling, and once more around the step: they hold together.
    mine -= {
        script.text(one.test)
        for one in list_own_conditions(script, step.call, unscale.call)
        if not _is_window_condition(one)
    }
    for condition in list_own_conditions(script, step.call, unscale.call):
        # Code before the branch may jump away at all other micro-batches; then both run once a window.
        if _is_window_condition(condition) and script.text(condition.test) not in mine and not mine:
            return condition if can_reach(script, unscale.call, step.call) else None
    return None


def _is_window_condition(condition: ast.If) -> bool:
    """Return whether a condition holds once a window."""
    modulo = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(condition.test))
    return modulo or has_matching_name(condition.test, _WINDOW)


def _move_unscale(facts: ScriptFacts, unscale: ScalerCall, step: ScalerCall, window: ast.If) -> Patch:
    """Return the patch that moves the unscaling, and clips that follow it, into the branch."""
    script, patch = facts.script, facts.script.patch()
    between = [
        clip for clip in facts.scalers.clips
        if script.scopes[clip] is script.scopes[step.call]
        and is_earlier_node(unscale.call, clip) and is_earlier_node(clip, window)
        and window not in iterate_ancestors(script, clip)
    ]  # fmt: skip
    target = script.statement(step.call)
    if list_own_conditions(script, unscale.call, step.call):
        # The clip may be for both branches of `if amp`.
        patch.spoil()
    for call in [unscale.call, *between]:
        statement = script.statement(call)
        if not isinstance(statement, ast.Expr) or statement.lineno != statement.end_lineno:
            patch.spoil()
        patch.remove(statement)
        patch.insert_before(target, script.text(statement))
    return patch
