"""Find the spelling of autocast and GradScaler that torch is giving up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code import autocasts, scalers
from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import iterate_ancestors
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.script import Script
from halfstep.doctor.located import LocatedFinding

_OLD = autocasts.OLD | scalers.OLD
_ASKS = re.compile(r"hasattr|version|available|is_torch|greater|less", re.IGNORECASE)
_MOVED = {"autocast", "GradScaler"}


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield one note for a file that uses the old spelling outside of a check for an old torch."""
    script = facts.script
    calls = [call for call in script.calls_of(_OLD) if not _is_fallback(script, call)]
    if not calls:
        return
    calls.sort(key=lambda call: call.lineno)
    old = min(script.names(calls[0].func))
    device, name = old.split(".")[1], old.rpartition(".")[2]
    others = [str(call.lineno) for call in calls[1:11]]
    are = "call in line" if len(others) == 1 else "calls in lines"
    also = f"; the same applies to the {are} {', '.join(others)}" if others else ""
    yield script.finding(
        "old_amp_spelling",
        "note",
        calls[0],
        f"`{old}` has been deprecated since torch 2.4 and raises a FutureWarning at every call{also}",
        f'write torch.amp.{name}("{device}", ...)',
        _respell_calls(script, calls),
    )


def _is_fallback(script: Script, call: ast.Call) -> bool:
    """Return whether a call is for an older torch: in an `except`, or where a condition asks for a version."""
    for node in iterate_ancestors(script, call):
        if isinstance(node, ast.ExceptHandler):
            return True
        if isinstance(node, (ast.If, ast.IfExp)) and _ASKS.search(ast.unparse(node.test)):
            return True
    return False


def _respell_calls(script: Script, calls: list[ast.Call]) -> Patch:
    patch = script.patch()
    for call in sorted(calls, key=lambda one: (one.lineno, one.col_offset), reverse=True):
        patch.replace(call, _format_new_spelling(script, call, patch))
    for source in script.every(ast.ImportFrom):
        if source.module in ("torch.cuda.amp", "torch.cpu.amp"):
            if {alias.name for alias in source.names} <= _MOVED and script.scopes[source] is script.tree:
                names = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in source.names)
                patch.replace(source, f"from torch.amp import {names}")
            else:
                patch.spoil()
    return patch


def _format_new_spelling(script: Script, call: ast.Call, patch: Patch) -> str:
    old = min(script.names(call.func))
    device, name = old.split(".")[1], old.rpartition(".")[2]
    given = [script.text(one) for one in call.args]
    if name == "autocast":
        # The old one takes `enabled` first, the new one the device and the dtype.
        order = ("enabled", "dtype", "cache_enabled")
        given = [f"{key}={text}" for key, text in zip(order, given, strict=False)]
    given += [
        f"{one.arg}={script.text(one.value)}" if one.arg else f"**{script.text(one.value)}" for one in call.keywords
    ]
    where = "" if isinstance(call.func, ast.Name) else "torch.amp."
    if where and "torch" not in script.names(ast.Name("torch", ast.Load())):
        patch.spoil()
    if not where and isinstance(call.func, ast.Name):
        name = call.func.id
    return f"{where}{name}({', '.join([f'{chr(34)}{device}{chr(34)}', *given])})"
