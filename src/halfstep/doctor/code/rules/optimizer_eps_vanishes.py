"""Find an optimizer whose eps is 0 in the format of its weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.script import find_argument, has_unpacked_arguments
from halfstep.doctor.code.trained import find_fp16_optimizers
from halfstep.doctor.located import LocatedFinding

_DEFAULTS = {"Adam": 1e-8, "AdamW": 1e-8, "RMSprop": 1e-8, "NAdam": 1e-8, "RAdam": 1e-8, "Adamax": 1e-8}
"""Optimizers that divide by sqrt(v) + eps."""
ZERO_IN_FP16 = 2.0**-25
"""Half of the smallest number of fp16: numbers up to this round to 0."""


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every such optimizer over fp16 weights."""
    for found in find_fp16_optimizers(facts.script):
        call = found.optimizer
        name = next(iter(facts.script.names(call.func))).rpartition(".")[2]
        given = find_argument(call, "eps")
        eps = (
            _DEFAULTS.get(name) if given is None and not has_unpacked_arguments(call) else facts.script.constant(given)
        )
        if name not in _DEFAULTS or not isinstance(eps, float) or not 0 < eps <= ZERO_IN_FP16:
            continue
        yield facts.script.finding(
            "optimizer_eps_vanishes",
            "error",
            call,
            f"{name}'s eps of {eps:g} is 0 in fp16, the format of `{found.module}` (line {found.cast.lineno}): a "
            "weight with gradient 0 is updated by 0 / 0, and is NaN after the first step",
            "keep trainable weights in fp32; or pass an eps that fp16 can represent: eps=1e-4",
            _set_eps(facts, call, given),
        )


def _set_eps(facts: ScriptFacts, call: ast.Call, given: ast.expr | None) -> Patch:
    patch = facts.script.patch()
    if isinstance(given, ast.Constant):
        patch.replace(given, "1e-4")
    elif given is None and not has_unpacked_arguments(call):
        patch.replace(call, facts.script.with_argument(call, "eps=1e-4"))
    else:
        patch.spoil()
    return patch
