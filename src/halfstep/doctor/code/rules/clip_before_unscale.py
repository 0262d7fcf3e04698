"""Find gradient clipping that sees scaled gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import list_own_conditions
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.scalers import ScalerCall, can_reach
from halfstep.doctor.code.script import find_method_name, format_variable, iterate_names
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every clip between a scaled backward pass and the scaler's step, without `unscale_`."""
    for clip in facts.scalers.clips:
        step = _find_step_after(facts, clip)
        if step is None:
            continue
        optimizer = step.optimizer or "optimizer"
        yield facts.script.finding(
            "clip_before_unscale",
            "error",
            clip,
            f"`{facts.script.text(clip)[:80]}` clips gradients that are still scaled by `{step.scaler}`, "
            "by 65536 at first: the effective threshold is smaller by this factor",
            f"put `{step.scaler}.unscale_({optimizer})` before it",
            _insert_unscale(facts, clip, step, optimizer),
        )


def _find_step_after(facts: ScriptFacts, clip: ast.Call) -> ScalerCall | None:
    """Return the scaler's step after the clipping; None if the gradients are unscaled, or not scaled."""
    script, scope = facts.script, facts.script.scopes[clip]
    if any("scale" in word for word in iterate_names(clip)):
        return None
    # A function that reads the scale may unscale by hand.
    if any("get_scale" in iterate_names(call.func) for call in script.calls(scope)):
        return None
    for step in facts.scalers.of("step", scope):
        backwards = [
            one for one in facts.scalers.of("backward", scope, step.scaler)
            if can_reach(script, one.call, clip) and can_reach(script, one.call, step.call)
        ]  # fmt: skip
        if backwards and can_reach(script, clip, step.call) and not _is_unscaled(facts, clip):
            return None if facts.scalers.is_off(step.call) or _has_other_test(facts, clip, step) else step
    return None


def _is_unscaled(facts: ScriptFacts, clip: ast.Call) -> bool:
    """Return whether something unscales before, `scaler.unscale_` or a function of that name."""
    calls = [
        call
        for call in facts.script.calls(facts.script.scopes[clip])
        if "unscale" in (find_method_name(call) or format_variable(call.func) or "")
    ]
    return any(can_reach(facts.script, call, clip) for call in calls)


def _has_other_test(facts: ScriptFacts, clip: ast.Call, step: ScalerCall) -> bool:
    """Return whether the clip runs only where the step does not: `if not amp: clip`, `if amp: scaler.step`."""
    own = {word for one in list_own_conditions(facts.script, clip, step.call) for word in iterate_names(one.test)}
    other = {word for one in list_own_conditions(facts.script, step.call, clip) for word in iterate_names(one.test)}
    return bool(own & other)


def _insert_unscale(facts: ScriptFacts, clip: ast.Call, step: ScalerCall, optimizer: str) -> Patch:
    patch, script = facts.script.patch(), facts.script
    statement = script.statement(clip)
    # If the step is under a separate condition, as in accumulation, unscaling has to move there too.
    if list_own_conditions(script, step.call, clip) or step.optimizer is None or not isinstance(statement, _SIMPLE):
        patch.spoil()
    patch.insert_before(statement, f"{step.scaler}.unscale_({optimizer})")
    for late in facts.scalers.of("unscale", script.scopes[clip], step.scaler):
        # Unscaling twice before an update raises.
        if late.optimizer == step.optimizer and can_reach(script, clip, late.call):
            patch.remove(script.statement(late.call))
    return patch


_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign)
