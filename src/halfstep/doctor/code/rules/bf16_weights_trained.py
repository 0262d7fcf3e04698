"""Find a plain optimizer over weights that were cast to bf16."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.trained import find_narrow_optimizers
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every optimizer over bf16 weights."""
    for found in find_narrow_optimizers(facts.script, "bf16"):
        yield facts.script.finding(
            "bf16_weights_trained",
            "warning",
            found.cast,
            f"`{found.module}` is in bf16, and the optimizer of line {found.optimizer.lineno} steps these weights "
            "themselves: bf16 has 8 digits, and an update below 1/256 of a weight is rounded away",
            "leave the weights in fp32 and compute under torch.autocast(..., dtype=torch.bfloat16)",
        )
