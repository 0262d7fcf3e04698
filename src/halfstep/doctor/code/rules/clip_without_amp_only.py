"""Find gradient clipping that only the branch without a scaler has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import are_mutually_exclusive, find_enclosing_loop, is_earlier_node
from halfstep.doctor.code.scalers import ScalerCall
from halfstep.doctor.code.script import find_method_name, format_variable
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for a clip before `optimizer.step()`, where the scaler's step of the other branch has none."""
    script = facts.script
    for clip in facts.scalers.clips:
        scope = script.scopes[clip]
        plain = [
            call
            for _, call in facts.optimizer_steps
            if script.scopes[call] is scope
            and is_earlier_node(clip, call)
            and not are_mutually_exclusive(facts.script, clip, call)
        ]
        for step in facts.scalers.of("step", scope):
            others = [call for call in plain if _are_branches(facts, step, call)]
            if others and are_mutually_exclusive(script, clip, step.call) and not _is_clipped(facts, step):
                yield script.finding(
                    "clip_without_amp_only",
                    "warning",
                    clip,
                    f"`{script.text(clip)[:80]}` runs only where `{step.scaler}` does not: with mixed precision "
                    f"(`{step.scaler}.step` of line {step.call.lineno}) gradients are not clipped",
                    f"clip there, too: `{step.scaler}.unscale_({step.optimizer})`, the clip, `{step.scaler}.step(...)`",
                )
                break


def _are_branches(facts: ScriptFacts, step: ScalerCall, call: ast.Call) -> bool:
    """Return whether one pass takes one of the two steps of one optimizer."""
    script = facts.script
    first, second = sorted((step.call, call), key=lambda node: (node.lineno, node.col_offset))
    same_loop = find_enclosing_loop(script, step.call) is find_enclosing_loop(script, call)
    paths = {stepping: path for path, stepping in facts.optimizer_steps}
    return same_loop and are_mutually_exclusive(script, first, second) and paths.get(call) == step.optimizer


def _is_clipped(facts: ScriptFacts, step: ScalerCall) -> bool:
    """Return whether anything of this function that clips can come before the scaler's step."""
    script = facts.script
    for call in script.calls(script.scopes[step.call]):
        words = (
            f"{find_method_name(call) or ''} {format_variable(call.func) or ''} "
            f"{' '.join(k.arg or '' for k in call.keywords)}"
        )
        if "clip" in words or "max_norm" in words or "grad_norm" in words:
            first, second = sorted((step.call, call), key=lambda node: (node.lineno, node.col_offset))
            if not are_mutually_exclusive(script, first, second):
                return True
    return False
