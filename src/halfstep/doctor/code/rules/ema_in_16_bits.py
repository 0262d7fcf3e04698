"""Find a weight average that is kept in 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.formats import Named, find_cast_format, find_module_format
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.rules.ema_on_skipped_steps import AVERAGE
from halfstep.doctor.code.script import Script, find_method_name, find_receiver, format_variable
from halfstep.doctor.located import LocatedFinding

_AVERAGES = ("AveragedModel", "EMAModel", "ExponentialMovingAverage", "ModelEma", "ModelEmaV2", "ModelEmaV3")
_METHODS = ("update", "step", "update_parameters")
_IN_PLACE = ("lerp_", "mul_", "add_", "copy_")
_FUNCTION = re.compile(r"ema|average|accumulate|update", re.IGNORECASE)
_LOST = {"bf16": "1/512", "fp16": "1/4096"}


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every average that certainly is in bf16 or fp16, in a file that updates one."""
    script = facts.script
    for node in script.every(ast.Assign):
        path = format_variable(node.targets[0])
        if path is None or not AVERAGE.search(path.rpartition(".")[2]):
            continue
        format = _find_average_format(script, node.value)
        if format is None or _is_widened(script, path) or not _is_updated(script, path):
            continue
        yield script.finding(
            "ema_in_16_bits",
            "warning",
            node,
            f"`{path}` is an average in {format}: a change of less than {_LOST[format]} of a weight rounds away, and "
            "with a decay of 0.999 or more that is nearly every one, so that the average never moves",
            f"keep the average in fp32: {path}.float()",
            _widen_average(script, node, format),
        )


def _is_updated(script: Script, path: str) -> bool:
    """Return whether an average is updated: by its own method, by a function, or weight by weight in a loop."""
    for call in script.calls():
        if find_receiver(call) == path and find_method_name(call) in _METHODS:
            return True
        name = find_method_name(call) or format_variable(call.func) or ""
        if _FUNCTION.search(name) and path in {format_variable(given) for given in call.args}:
            return True
    return any(
        path in {format_variable(node) for node in ast.walk(loop.iter)}
        and any(find_method_name(node) in _IN_PLACE for node in ast.walk(loop))
        for loop in script.every(ast.For)
    )


def _find_average_format(script: Script, value: ast.expr) -> Named | None:
    """Return the format of an average: of a copy of a module, or of a class over its parameters."""
    found = find_module_format(script, value)
    if found is not None or not isinstance(value, ast.Call):
        return found
    name = value.func.attr if isinstance(value.func, ast.Attribute) else format_variable(value.func)
    given = value.args[0] if value.args and name in _AVERAGES else None
    if given is not None and find_method_name(given) == "parameters" and isinstance(given, ast.Call):
        given = given.func.value if isinstance(given.func, ast.Attribute) else None
    return find_module_format(script, given) if given is not None else None


def _is_widened(script: Script, path: str) -> bool:
    """Return whether the average is cast to fp32 afterwards."""
    for call in script.calls():
        if (
            isinstance(call.func, ast.Attribute)
            and format_variable(call.func.value) == path
            and find_cast_format(script, call) == "fp32"
        ):
            return True
    return False


def _widen_average(script: Script, node: ast.Assign, format: Named) -> Patch:
    patch, value = script.patch(), node.value
    is_own = isinstance(value, ast.Call) and find_cast_format(script, value) == format and len(value.args) <= 1
    if is_own and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        inner = value.func.value
        # A copy of a module that is itself in 16 bits stays so without the cast.
        if find_module_format(script, inner) is None:
            patch.replace(value, script.text(inner))
            return patch
    # lerp_ takes two tensors of one format; add_ and a class of averages widen by themselves.
    mixes = not any(find_method_name(call) in ("lerp_", "_foreach_lerp_") for call in script.calls())
    if mixes and isinstance(value, ast.Call) and script.names(value.func) == {"copy.deepcopy"}:
        patch.replace(value, f"{script.text(value)}.float()")
    else:
        patch.spoil()
    return patch
