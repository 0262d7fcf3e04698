"""A policy keeps the head in bf16, and the table of layers says what is converted."""

from __future__ import annotations

from halfstep.precision.names import parse_policy_name, parse_precision
from halfstep.precision.policy import resolve_policy
from zoo.outcome import Outcome
from zoo.p55_head_in_fp8.plain import NEAR, logits_off, model


def run() -> Outcome:
    net = model()
    converted = resolve_policy(net, *parse_policy_name(parse_precision({"default": "fp8", "head": "bf16"}).name)).kinds
    off = logits_off(net, converted)
    seen = f"converted: {', '.join(converted)}; the logits are {off:.1%} off"
    return Outcome(good=off < NEAR and set(converted) == {"up", "down"}, seen=seen)
