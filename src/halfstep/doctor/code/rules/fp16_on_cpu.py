"""Find fp16 on a CPU: silently substituted formats, and operations without fast kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.script import Script, find_argument
from halfstep.doctor.located import LocatedFinding

_ACCELERATORS = frozenset({"accelerate.Accelerator", "accelerate.accelerator.Accelerator"})
_TRAINERS = frozenset(
    f"lightning.{name}" for name in ("Trainer", "pytorch.Trainer", "pytorch.trainer.Trainer", "Fabric", "fabric.Fabric")
)
_FP16 = ("16-mixed", "16", 16)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every call that asks for fp16 and for a CPU."""
    if "cpu" not in facts.script.source:
        return
    for call in facts.script.calls_of(_ACCELERATORS):
        given = find_argument(call, "mixed_precision", 2)
        if facts.script.constant(find_argument(call, "cpu")) is True and facts.script.constant(given) == "fp16":
            evidence = "`cpu=True` with `mixed_precision='fp16'`: accelerate reports fp16 but silently computes in fp32"
            yield _build_bf16_finding(facts.script, call, given, evidence, '"bf16"')
    for call in facts.script.calls_of(_TRAINERS):
        given = find_argument(call, "precision")
        if facts.script.constant(find_argument(call, "accelerator")) == "cpu" and facts.script.constant(given) in _FP16:
            evidence = "`accelerator='cpu'` with fp16 precision: Lightning puts bf16-mixed in its place"
            yield _build_bf16_finding(facts.script, call, given, evidence, '"bf16-mixed"')
    yield from _check_autocasts(facts)


def _check_autocasts(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    for autocast in facts.autocasts.on:
        if autocast.device != "cpu" or autocast.format != "fp16":
            continue
        given = find_argument(autocast.call, "dtype", 1)
        evidence = (
            "autocast in fp16 on a CPU: older versions of torch switch it off with a warning, newer ones run it on "
            "kernels that are many times slower than those of fp32"
        )
        # With a scaler, bf16 alone would be the next finding.
        safe = given if not facts.scalers.made else None
        yield _build_bf16_finding(facts.script, autocast.call, safe, evidence, "torch.bfloat16")


def _build_bf16_finding(
    script: Script, call: ast.Call, given: ast.expr | None, evidence: str, bf16: str
) -> LocatedFinding:
    patch = script.patch()
    is_here = given is not None and not isinstance(given, ast.Name)
    patch.replace(given, bf16) if is_here and given is not None else patch.spoil()
    return script.finding("fp16_on_cpu", "warning", call, evidence, f"request bf16 on a CPU: {bf16}", patch)
