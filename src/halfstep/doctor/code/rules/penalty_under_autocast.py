"""Find a gradient penalty that is computed under fp16 autocast, from gradients that nothing scales."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import Facts
from halfstep.doctor.code.script import argument, words_in
from halfstep.doctor.located import LocatedFinding

_GRAD = frozenset({"torch.autograd.grad"})


def look(facts: Facts) -> Iterator[LocatedFinding]:
    """Yield a finding for every `autograd.grad(..., create_graph=True)` of unscaled scores under fp16 autocast."""
    script = facts.script
    calls = [call for call in script.calls() if script.is_one_of(call.func, _GRAD)]
    for call in calls:
        is_penalty = script.constant(argument(call, "create_graph")) is True
        near = facts.autocasts.around(call)
        if not is_penalty or near is None or not near.may_be_on or near.format != "fp16":
            continue
        if not any("scale" in word for word in words_in(call)) and not _is_scaled(facts, call):
            yield script.finding(
                "penalty_under_autocast",
                "warning",
                call,
                f"`{script.text(call)[:60]}` runs under the {near}, and its gradients are in fp16 without a scale: "
                "small ones become 0, and the penalty pulls towards a slope that is not there",
                "end autocast before it and compute the penalty in fp32; or scale: "
                "autograd.grad(scaler.scale(scores), ...), and divide by scaler.get_scale()",
            )


def _is_scaled(facts: Facts, call: ast.Call) -> bool:
    """Return whether the scores are scaled before, in a variable."""
    given = call.args[0] if call.args else argument(call, "outputs")
    values = facts.script.bindings(given) if given is not None else []
    return any(value is not None and any("scale" in word for word in words_in(value)) for value in values)
