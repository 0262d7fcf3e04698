"""Find a checkpoint with the optimizer's state and without the scaler's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import iterate_ancestors
from halfstep.doctor.code.script import Script, find_method_name, find_receiver, format_variable
from halfstep.doctor.located import LocatedFinding

_SCALER = re.compile(r"scaler|(^|[._])amp($|[._])|mixed_precision", re.IGNORECASE)
_SAVES = re.compile(r"save|checkpoint|ckpt|dump", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim|(^|[._])opt(_\w+)?$", re.IGNORECASE)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for the first optimizer's state of each saved dictionary, where no scaler's state is saved."""
    script = facts.script
    steps = [one for one in facts.scalers.of("step") if not facts.scalers.is_off(one.call)]
    on = facts.autocasts.on
    is_known_bf16 = bool(on) and all(one.format == "bf16" for one in on)
    if not steps or is_known_bf16 or _has_saved_scaler(facts):
        return
    met: set[ast.AST] = set()
    for call in script.calls():
        path = find_receiver(call) or ""
        if find_method_name(call) != "state_dict" or not _OPTIMIZER.search(path) or _SCALER.search(path):
            continue
        holder = _find_state_holder(script, call)
        scope = script.scopes[call]
        if holder is None or scope in met or not _is_saved(script, call, scope):
            continue
        met.add(scope)
        yield script.finding(
            "scaler_not_saved",
            "warning",
            call,
            f"`{script.text(call)[:60]}` is saved, and the state of `{steps[0].scaler}` (line {steps[0].call.lineno}) "
            "is not: a resumed run starts again at a scale of 65536, and skips steps until it has fallen",
            f'save it, too: "scaler": {steps[0].scaler}.state_dict(), and load it where the optimizer is loaded',
        )


def _has_saved_scaler(facts: ScriptFacts) -> bool:
    """Return whether a state of a scaler is taken anywhere in the file, or the scaler itself is handed on."""
    script = facts.script
    paths = {one.scaler for one in facts.scalers.calls}
    for call in script.calls():
        path = find_receiver(call) or ""
        if find_method_name(call) in ("state_dict", "load_state_dict") and (path in paths or _SCALER.search(path)):
            return True
        if _SAVES.search(_find_called_name(call)) and any(
            _is_scaler(one, paths) for one in [*call.args, *(keyword.value for keyword in call.keywords)]
        ):
            return True
    values = (value for node in script.every(ast.Dict) for value in node.values)
    if any(_is_scaler(value, paths) for value in values):
        return True
    names = ("scaler", "amp", "grad_scaler", "scaler_state_dict")
    return any(isinstance(node.value, str) and node.value in names for node in script.every(ast.Constant))


def _is_scaler(node: ast.expr, paths: set[str]) -> bool:
    return any(format_variable(one) in paths for one in ast.walk(node))


def _find_called_name(call: ast.Call) -> str:
    return find_method_name(call) or format_variable(call.func) or ""


def _find_state_holder(script: Script, call: ast.Call) -> ast.AST | None:
    """Return the dictionary, the assignment to a key or the call of `save` that a state goes into."""
    inner: ast.AST = call
    for outer in iterate_ancestors(script, call):
        if isinstance(outer, ast.Dict) and inner in outer.values:
            return outer
        if isinstance(outer, ast.Call) and inner is not outer.func:
            name = _find_called_name(outer)
            is_record = isinstance(inner, ast.keyword) and name[:1].isupper()
            return outer if name in ("dict", "update", "save") or is_record else None
        if isinstance(outer, ast.keyword):
            inner = outer
            continue
        if isinstance(outer, ast.Assign):
            return outer if isinstance(outer.targets[0], ast.Subscript) else None
        if not isinstance(outer, (ast.IfExp, ast.keyword)):
            return None
        inner = outer
    return None


def _is_saved(script: Script, call: ast.Call, scope: ast.AST) -> bool:
    """Return whether the function saves something, or is itself one that makes a checkpoint."""
    name = getattr(scope, "name", "")
    return bool(_SAVES.search(name)) or any(
        _SAVES.search(_find_called_name(one)) and not _find_called_name(one).startswith("load")
        for one in script.calls(scope)
    )
