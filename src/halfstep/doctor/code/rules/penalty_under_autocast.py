"""Find a gradient penalty that is computed under fp16 autocast, from gradients that nothing scales."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.formats import find_function_definition
from halfstep.doctor.code.script import find_argument, iterate_names
from halfstep.doctor.located import LocatedFinding

_GRAD = frozenset({"torch.autograd.grad"})


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every `autograd.grad(..., create_graph=True)` of unscaled scores under fp16 autocast."""
    for call in _find_unscaled_penalties(facts):
        near = facts.autocasts.around(call)
        yield facts.script.finding(
            "penalty_under_autocast",
            "warning",
            call,
            f"`{facts.script.text(call)[:60]}` runs under the {near}, and its gradients are in fp16 without a scale: "
            "small ones become 0, and the penalty pulls towards a slope that is not there",
            "end autocast before it and compute the penalty in fp32; or scale: "
            "autograd.grad(scaler.scale(scores), ...), and divide by scaler.get_scale()",
        )


def _find_unscaled_penalties(facts: ScriptFacts) -> Iterator[ast.Call]:
    """Yield the unscaled penalties under fp16 autocast, and calls there of functions that compute one."""
    script = facts.script
    penalties = [
        call for call in script.calls_of(_GRAD)
        if script.constant(find_argument(call, "create_graph")) is True
        and not any("scale" in word for word in iterate_names(call))
        and not _is_scaled(facts, call)
    ]  # fmt: skip
    computing = {script.scopes[call] for call in penalties if facts.autocasts.around(call) is None}
    called = (
        [call for call in script.calls() if find_function_definition(script, call.func) in computing]
        if computing
        else []
    )
    for call in (*penalties, *called):
        near = facts.autocasts.around(call)
        if near is not None and near.may_be_on and near.format == "fp16":
            yield call


def _is_scaled(facts: ScriptFacts, call: ast.Call) -> bool:
    """Return whether the scores are scaled before, in a variable."""
    given = call.args[0] if call.args else find_argument(call, "outputs")
    values = facts.script.bindings(given) if given is not None else []
    return any(value is not None and any("scale" in word for word in iterate_names(value)) for value in values)
