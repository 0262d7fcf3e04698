"""Find binary cross entropy of probabilities under autocast, which CUDA refuses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.autocasts import Autocast
from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.script import Script, find_method_name, format_variable
from halfstep.doctor.located import LocatedFinding

_FUNCTIONS = frozenset({"torch.nn.functional.binary_cross_entropy"})
_LOSSES = frozenset({"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"})
_SIGMOIDS = frozenset({"torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit"})
_PLAIN = {"sigmoid", "squeeze", "unsqueeze", "view", "reshape", "flatten", "float", "to", "detach", "view_as", "size"}


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every such loss that may run under an autocast of a GPU."""
    if "BCELoss" not in facts.script.source and "binary_cross_entropy" not in facts.script.source:
        return
    for call in facts.script.calls():
        made = _find_construction(facts.script, call)
        if made is None and not facts.script.is_one_of(call.func, _FUNCTIONS):
            continue
        for autocast in facts.autocasts.over(call)[:1]:
            if autocast.device == "cpu":  # which computes it in fp32
                continue
            yield facts.script.finding(
                "bce_under_autocast",
                "error",
                call,
                f"`{facts.script.text(call)[:80]}` runs under the {autocast}, and CUDA's autocast refuses it: "
                "'binary_cross_entropy and BCELoss are unsafe to autocast'",
                "leave the sigmoid out and use binary_cross_entropy_with_logits or BCEWithLogitsLoss",
                _fix_loss(facts, call, made, autocast),
            )


def _find_construction(script: Script, call: ast.Call) -> ast.Call | None:
    """Return the `nn.BCELoss(...)` behind a call of a criterion."""
    value = call.func if isinstance(call.func, ast.Call) else script.value(call.func)
    is_loss = isinstance(value, ast.Call) and script.is_one_of(value.func, _LOSSES)
    return value if is_loss and isinstance(value, ast.Call) else None


def _fix_loss(facts: ScriptFacts, call: ast.Call, made: ast.Call | None, autocast: Autocast) -> Patch:
    script, patch = facts.script, facts.script.patch()
    logits = _find_logits(script, call.args[0]) if call.args else None
    uses = [one for one in script.calls() if made is not None and _find_construction(script, one) is made]
    if logits is not None and len(uses) <= 1:
        patch.replace(call.args[0], script.text(logits))
        _rename_to_logits(patch, made.func if made is not None else call.func)
    else:
        _widen_loss(facts, patch, call, autocast)
    return patch


def _find_logits(script: Script, node: ast.expr) -> ast.expr | None:
    """Return x of `torch.sigmoid(x)` or `x.sigmoid()`."""
    if not isinstance(node, ast.Call):
        return None
    if script.is_one_of(node.func, _SIGMOIDS) and len(node.args) == 1:
        return node.args[0]
    is_method = find_method_name(node) == "sigmoid" and not node.args and isinstance(node.func, ast.Attribute)
    return node.func.value if is_method and isinstance(node.func, ast.Attribute) else None


def _rename_to_logits(patch: Patch, function: ast.expr) -> None:
    text = ast.unparse(function)
    is_dotted = "." in text
    if text.endswith("BCELoss") and is_dotted:
        patch.replace(function, text.removesuffix("BCELoss") + "BCEWithLogitsLoss")
    elif text.endswith("binary_cross_entropy") and is_dotted:
        patch.replace(function, text + "_with_logits")
    else:
        patch.spoil()


def _widen_loss(facts: ScriptFacts, patch: Patch, call: ast.Call, autocast: Autocast) -> None:
    """Compute the loss in fp32, where its arguments are there already and need no model."""
    script, statement = facts.script, facts.script.statement(call)
    inner = {node.func for one in call.args for node in ast.walk(one) if isinstance(node, ast.Call)}
    names = {one.attr if isinstance(one, ast.Attribute) else format_variable(one) for one in inner}
    is_alone = isinstance(statement, ast.Assign) and statement.value is call and len(call.args) >= 1
    if not is_alone or not names <= _PLAIN or statement.lineno != statement.end_lineno:
        patch.spoil()
        return
    if "torch" not in script.names(ast.Name("torch", ast.Load())):
        patch.spoil()
    device = autocast.device or "cuda"
    patch.insert_before(statement, f'with torch.autocast("{device}", enabled=False):')
    first = script.text(call.args[0])
    text = script.text(statement).replace(first, f"{first}.float()", 1)
    patch.replace(statement, f"    {text}")
