"""Find fp16 autocast with a backward pass and no gradient scaler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.autocasts import Autocast
from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import find_enclosing_loop, is_earlier_node, iterate_ancestors
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.script import FUNCTIONS, find_method_name, iterate_names
from halfstep.doctor.located import LocatedFinding

_SCALED = re.compile(r"scal(er|ed|e_loss|ing)|loss_scale|apex|deepspeed|accelerat|fabric|lightning", re.IGNORECASE)
"""Words of code that scales in another way, or leaves it to a library."""
_ADVANCES = re.compile(r"sched|ema|swa", re.IGNORECASE)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every backward pass of a loss that certainly comes from fp16 autocast without a scaler."""
    script = facts.script
    certain = [one for one in facts.autocasts.on if one.format == "fp16" and one.enabled]
    # A backward pass without an optimizer is after the gradients of an input, which nothing accumulates.
    if not certain or not facts.optimizer_steps or _has_loss_scaling(facts):
        return
    for call in facts.backwards:
        if (autocast := _find_autocast(facts, call, certain)) is not None:
            loss = script.text(call.func.value) if isinstance(call.func, ast.Attribute) else "the loss"
            device = autocast.device or "cuda"
            yield script.finding(
                "fp16_without_scaler",
                "error",
                call,
                f"`{loss}` is computed in fp16 under the {autocast}, and its backward pass is not scaled: gradients "
                "below 6e-8 become 0, with no error",
                f'scaler = torch.amp.GradScaler("{device}"); scaler.scale({loss}).backward(); '
                "scaler.step(optimizer); scaler.update(); or compute in bf16: dtype=torch.bfloat16",
                _add_scaler(facts, call, device),
            )


def _has_loss_scaling(facts: ScriptFacts) -> bool:
    if facts.scalers.made or facts.scalers.calls:
        return True
    script = facts.script
    words = {
        str(getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", ""))
        for node in script.each(ast.Name, ast.Attribute, ast.arg)
    }
    imported = {alias.name for node in script.each(ast.Import, ast.ImportFrom) for alias in node.names}
    sources = {node.module or "" for node in script.every(ast.ImportFrom)}
    return any(_SCALED.search(word) for word in words | imported | sources)


def _find_autocast(facts: ScriptFacts, call: ast.Call, certain: list[Autocast]) -> Autocast | None:
    """Return the autocast under which a loss was computed: a plain variable that is assigned inside of it."""
    loss = call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(loss, ast.Name) or call.args:
        return None
    scope = facts.script.scopes[call]
    for autocast in certain:
        for node in (one for statement in facts.autocasts.body(autocast) for one in ast.walk(statement)):
            is_same = isinstance(node, ast.Name) and node.id == loss.id and isinstance(node.ctx, ast.Store)
            is_before = is_same and facts.script.scopes[node] is scope and is_earlier_node(node, call)
            if is_before and facts.autocasts.around(node) is autocast:
                return autocast
    return None


def _add_scaler(facts: ScriptFacts, call: ast.Call, device: str) -> Patch:
    """Return the patch for the plain case: one loop, one backward pass, one step, nothing that follows a schedule."""
    script, patch = facts.script, facts.script.patch()
    scope = script.scopes[call]
    loops = [one for one in iterate_ancestors(script, call) if isinstance(one, (ast.For, ast.While))]
    steps = [
        one for path, one in facts.optimizer_steps if script.scopes[one] is scope and find_enclosing_loop(script, one)
    ]
    here = [one for one in facts.backwards if script.scopes[one] is scope]
    is_plain = len(here) == len(steps) == 1 and bool(loops) and "torch" in script.names(ast.Name("torch", ast.Load()))
    if not is_plain or not isinstance(steps[0].func, ast.Attribute) or _has_other_updates(facts, scope):
        patch.spoil()
        return patch
    optimizer = script.text(steps[0].func.value)
    assert isinstance(call.func, ast.Attribute)
    node = loops[-1]
    assert isinstance(node, ast.stmt)
    patch.insert_before(node, f'scaler = torch.amp.GradScaler("{device}")')
    patch.replace(call.func.value, f"scaler.scale({script.text(call.func.value)})")
    for clip in [one for one in facts.scalers.clips if script.scopes[one] is scope][:1]:
        patch.insert_before(script.statement(clip), f"scaler.unscale_({optimizer})")
    patch.replace(script.statement(steps[0]), f"scaler.step({optimizer})")
    patch.insert_after(script.statement(steps[0]), "scaler.update()")
    return patch


def _has_other_updates(facts: ScriptFacts, scope: ast.AST) -> bool:
    """Return whether a schedule or an average would have to be held back on skipped steps too."""
    steps = [
        one for one in facts.script.calls(scope) if find_method_name(one) in ("step", "update", "update_parameters")
    ]
    many_clips = len([one for one in facts.scalers.clips if facts.script.scopes[one] is scope]) > 1
    advances = any(_ADVANCES.search(word) for one in steps for word in iterate_names(one.func))
    return advances or many_clips or not isinstance(scope, (*FUNCTIONS, ast.Module))
