"""Find weights that are cast to fp16 and then trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.formats import find_cast_format
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.trained import NarrowOptimizer, find_fp16_optimizers
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every cast to fp16 of a module whose parameters an optimizer of torch then gets."""
    for found in find_fp16_optimizers(facts.script):
        yield facts.script.finding(
            "half_weights_trained",
            "error",
            found.cast,
            f"`{facts.script.text(found.cast)[:60]}` makes `{found.module}` fp16, and the optimizer of line "
            f"{found.optimizer.lineno} trains it: updates below 1/2048 of a weight are lost, and GradScaler raises "
            "'Attempting to unscale FP16 gradients'",
            "keep trainable weights in fp32, and let torch.autocast compute in 16 bits",
            _remove_cast(facts, found),
        )


def _remove_cast(facts: ScriptFacts, found: NarrowOptimizer) -> Patch:
    """Return the patch that takes the cast away, where nothing else in the file is cast to match."""
    script, patch = facts.script, facts.script.patch()
    others = [call for call in script.calls() if find_cast_format(script, call) == "fp16" and call is not found.cast]
    others += [call for call in script.calls() if any(one.arg in ("dtype", "torch_dtype") for one in call.keywords)]
    cast, statement = found.cast, script.statement(found.cast)
    is_cast = find_cast_format(script, cast) == "fp16" and isinstance(cast.func, ast.Attribute)
    if others or not is_cast or not isinstance(cast.func, ast.Attribute) or len(cast.args) > 1:
        patch.spoil()
    elif isinstance(statement, ast.Expr) and statement.value is cast:
        patch.remove(statement)
    else:
        patch.replace(cast, script.text(cast.func.value))
    return patch
