"""Find gradient clipping that sees scaled gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import Facts
from halfstep.doctor.code.order import own_conditions
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.scalers import ScalerCall, follows
from halfstep.doctor.code.script import method, path_of, words_in
from halfstep.doctor.located import LocatedFinding


def look(facts: Facts) -> Iterator[LocatedFinding]:
    """Yield a finding for every clip between a scaled backward pass and the scaler's step, without `unscale_`."""
    for clip in facts.scalers.clips:
        step = _step_after(facts, clip)
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


def _step_after(facts: Facts, clip: ast.Call) -> ScalerCall | None:
    """Return the scaler's step after the clipping; None if the gradients are unscaled, or not scaled."""
    script, scope = facts.script, facts.script.scopes[clip]
    if any("scale" in word for word in words_in(clip)):
        return None
    # A function that reads the scale may unscale by hand.
    if any("get_scale" in words_in(call.func) for call in script.calls(scope)):
        return None
    for step in facts.scalers.of("step", scope):
        backwards = [
            one for one in facts.scalers.of("backward", scope, step.scaler)
            if follows(script, one.call, clip) and follows(script, one.call, step.call)
        ]  # fmt: skip
        if backwards and follows(script, clip, step.call) and not _is_unscaled(facts, clip):
            return None if facts.scalers.is_off(step.call) or _has_other_test(facts, clip, step) else step
    return None


def _is_unscaled(facts: Facts, clip: ast.Call) -> bool:
    """Return whether something unscales before, `scaler.unscale_` or a function of that name."""
    calls = [
        call
        for call in facts.script.calls(facts.script.scopes[clip])
        if "unscale" in (method(call) or path_of(call.func) or "")
    ]
    return any(follows(facts.script, call, clip) for call in calls)


def _has_other_test(facts: Facts, clip: ast.Call, step: ScalerCall) -> bool:
    """Return whether the clip runs only where the step does not: `if not amp: clip`, `if amp: scaler.step`."""
    own = {word for one in own_conditions(facts.script, clip, step.call) for word in words_in(one.test)}
    other = {word for one in own_conditions(facts.script, step.call, clip) for word in words_in(one.test)}
    return bool(own & other)


def _insert_unscale(facts: Facts, clip: ast.Call, step: ScalerCall, optimizer: str) -> Patch:
    patch, script = facts.script.patch(), facts.script
    statement = script.statement(clip)
    # If the step is under a separate condition, as in accumulation, unscaling has to move there too.
    if own_conditions(script, step.call, clip) or step.optimizer is None or not isinstance(statement, _SIMPLE):
        patch.spoil()
    patch.insert_before(statement, f"{step.scaler}.unscale_({optimizer})")
    for late in facts.scalers.of("unscale", script.scopes[clip], step.scaler):
        # Unscaling twice before an update raises.
        if late.optimizer == step.optimizer and follows(script, clip, late.call):
            patch.remove(script.statement(late.call))
    return patch


_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign)
