"""Find switches that let torch add up fp16 products in fp16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.located import LocatedFinding
from halfstep.finding import Severity

_SWITCHES: dict[str, tuple[Severity, str]] = {
    "torch.backends.cuda.matmul.allow_fp16_accumulation": (
        "warning",
        "fp16 products are added up in fp16, whose largest number is 65504: long sums lose digits and overflow",
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        "note",
        "parts of an fp16 product that is split are added up in fp16: long sums lose digits and may overflow",
    ),
}


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every such switch that is set to True."""
    for node in facts.script.every(ast.Assign):
        on = isinstance(node.value, ast.Constant) and node.value.value is True
        for name in facts.script.names(node.targets[0]) & set(_SWITCHES) if on else ():
            severity, evidence = _SWITCHES[name]
            fix = f"write {name} = False while you train"
            yield facts.script.finding("fp16_accumulation", severity, node, evidence, fix)
