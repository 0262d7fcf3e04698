"""A pattern of a policy that matches no module is refused, with the names that there are."""

from __future__ import annotations

from halfstep.errors import PrecisionRefused
from halfstep.precision.names import parse_policy_name, parse_precision
from halfstep.precision.policy import resolve_policy
from zoo.outcome import Outcome
from zoo.p54_pattern_that_matches_nothing.plain import KEPT_OUT, model


def run() -> Outcome:
    policy = parse_precision({"default": "fp8", **dict.fromkeys(KEPT_OUT, "bf16")})
    default, rules = parse_policy_name(policy.name)
    try:
        resolve_policy(model(), default, rules)
    except PrecisionRefused as error:
        return Outcome(good=True, seen=f"{error.given}; {error.allowed}")
    return Outcome(good=False, seen="nothing was said")
