"""A pattern of a policy that matches no module is refused, with the names that there are."""

from __future__ import annotations

from halfstep.errors import PrecisionRefused
from halfstep.precision.names import policy_parts, read_precision
from halfstep.precision.policy import place
from zoo.outcome import Outcome
from zoo.p54_pattern_that_matches_nothing.plain import KEPT_OUT, model


def run() -> Outcome:
    policy = read_precision({"default": "fp8", **dict.fromkeys(KEPT_OUT, "bf16")})
    default, rules = policy_parts(policy.name)
    try:
        place(model(), default, rules)
    except PrecisionRefused as error:
        return Outcome(good=True, seen=f"{error.given}; {error.allowed}")
    return Outcome(good=False, seen="nothing was said")
