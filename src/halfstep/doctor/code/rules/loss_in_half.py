"""Find a loss that is computed from values that the code itself has cast to fp16."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.formats import find_cast_format
from halfstep.doctor.code.order import are_mutually_exclusive, is_earlier_node
from halfstep.doctor.code.script import Script
from halfstep.doctor.located import LocatedFinding

_NAME = re.compile(r"\w+_loss|cross_entropy|binary_cross_entropy\w*|kl_div")
_LOSS = re.compile(rf"torch\.nn\.functional\.({_NAME.pattern})")


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every cast to fp16 whose result goes into one of torch's losses, outside of autocast."""
    script = facts.script
    found: set[ast.Call] = set()
    for call in script.calls() if "half" in script.source or "float16" in script.source else ():
        # Most calls are of something else, which the last name tells without following any binding.
        is_other = isinstance(call.func, ast.Attribute) and not _NAME.fullmatch(call.func.attr)
        names = script.names(call.func) if not is_other else ()
        if not names or not all(map(_LOSS.fullmatch, names)) or facts.autocasts.over(call):
            continue
        if not (facts.backwards or isinstance(script.statement(call), ast.Return)):
            continue
        for given in call.args[:2]:
            cast = _find_fp16_cast(script, given, call)
            if cast is not None and cast not in found:
                found.add(cast)
                yield script.finding(
                    "loss_in_half",
                    "warning",
                    cast,
                    f"`{script.text(cast)[:60]}` goes into `{script.text(call)[:60]}`, which computes in fp16: sums "
                    "overflow above 65504, and small differences are lost",
                    "cast to fp32 before a loss: .float()",
                )


def _find_fp16_cast(script: Script, given: ast.expr, loss: ast.Call) -> ast.Call | None:
    """Return the cast to fp16 that a value has last been through before a loss."""
    values: list[ast.expr | None] = [given]
    if not isinstance(given, ast.Call):
        values = [one for one in script.bindings(given) if one is None or is_earlier_node(one, loss)]
    last = values[-1] if values else None
    if not isinstance(last, ast.Call) or find_cast_format(script, last) != "fp16":
        return None
    return last if last is given or not are_mutually_exclusive(script, last, loss) else None
