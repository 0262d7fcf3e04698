"""Find a gradient scaler that is switched on where autocast computes in bf16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import iterate_ancestors
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.scalers import ScalerConstruction
from halfstep.doctor.code.script import iterate_names
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every scaler that is certainly on, where all autocast is certainly in bf16."""
    on = facts.autocasts.on
    if not on or any(one.format != "bf16" for one in on) or not facts.scalers.of("backward"):
        return
    for made in facts.scalers.made:
        # A scaler that is made only in some cases: they may not be those of bf16.
        around = [one for one in iterate_ancestors(facts.script, made.call) if isinstance(one, (ast.If, ast.IfExp))]
        is_conditional = any("__name__" not in iterate_names(one.test) for one in around)
        is_on = made.enabled is True and not is_conditional
        if is_on or _has_same_switch(facts, made):
            yield facts.script.finding(
                "scaler_with_bf16",
                "warning",
                made.call,
                f"`{facts.script.text(made.call)[:60]}` is on, and the {on[0]} computes in bf16, which has the "
                "range of fp32: gradients need no loss scale, and CUDA cannot unscale those of bf16 weights",
                "switch it off: GradScaler(..., enabled=False); its calls then do nothing",
                _disable_scaler(facts, made.call),
            )


def _has_same_switch(facts: ScriptFacts, made: ScalerConstruction) -> bool:
    """Return whether the scaler is on exactly where every autocast is: one switch for both."""
    given = next((one.value for one in made.call.keywords if one.arg == "enabled"), None)
    parent = facts.script.parents.get(made.call)
    if given is None and isinstance(parent, ast.IfExp) and parent.body is made.call:
        given = parent.test
    switches = [next((k.value for k in one.call.keywords if k.arg == "enabled"), None) for one in facts.autocasts.on]
    return (
        given is not None
        and made.enabled is not False
        and all(one is not None and ast.dump(one) == ast.dump(given) for one in switches)
    )


def _disable_scaler(facts: ScriptFacts, call: ast.Call) -> Patch:
    patch = facts.script.patch()
    given = next((one.value for one in call.keywords if one.arg == "enabled"), None)
    if given is not None:
        patch.replace(given, "False")
    elif len(call.args) > 4:
        patch.spoil()
    else:
        patch.replace(call, facts.script.with_argument(call, "enabled=False"))
    return patch
