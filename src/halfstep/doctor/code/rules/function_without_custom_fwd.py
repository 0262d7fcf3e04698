"""Find an autograd.Function that multiplies matrices under autocast, and does not say in which format."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.code.script import FUNCTIONS, Function, find_method_name, iterate_names
from halfstep.doctor.located import LocatedFinding

_BASES = frozenset({"torch.autograd.Function", "torch.autograd.function.Function"})
_CAST = {
    "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "linear", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
"""Operations that autocast computes in 16 bits, also inside of a Function's forward, but not in its backward."""


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every such Function whose `apply` may run under an autocast."""
    for owner in facts.script.every(ast.ClassDef):
        if not any(facts.script.is_one_of(base, _BASES) for base in owner.bases):
            continue
        methods = {one.name: one for one in owner.body if isinstance(one, FUNCTIONS)}
        forward = methods.get("forward")
        if (
            forward is None
            or not _has_autocast_operation(forward)
            or any(_has_autocast_handling(facts, one) for one in methods.values())
        ):
            continue
        for call in _find_applied(facts, owner):
            device = facts.autocasts.over(call)[0].device or "cuda"
            yield facts.script.finding(
                "function_without_custom_fwd",
                "warning",
                forward,
                f"`{owner.name}.forward` multiplies in 16 bits where line {call.lineno} applies it under autocast, and "
                "its backward runs without autocast, on tensors of two formats",
                f'decorate forward with torch.amp.custom_fwd(device_type="{device}"), and backward with custom_bwd',
                _add_decorators(facts, methods, device),
            )
            break


def _find_applied(facts: ScriptFacts, owner: ast.ClassDef) -> Iterator[ast.Call]:
    """Yield the calls of `apply` that may run under an autocast."""
    for call in facts.script.calls():
        is_apply = find_method_name(call) == "apply" and isinstance(call.func, ast.Attribute)
        target = call.func.value if is_apply and isinstance(call.func, ast.Attribute) else None
        if isinstance(target, ast.Name) and target.id == owner.name and facts.autocasts.over(call):
            yield call


def _has_autocast_operation(forward: Function) -> bool:
    for node in ast.walk(forward):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _CAST and next(iter(iterate_names(node.func)), None) is not None:
                return True
    return False


def _has_autocast_handling(facts: ScriptFacts, function: Function) -> bool:
    """Return whether a method cares for autocast, by a decorator or inside."""
    words = {word for one in function.decorator_list for word in iterate_names(one)}
    return bool(words & {"custom_fwd", "custom_bwd"}) or "autocast" in set(iterate_names(function))


def _add_decorators(facts: ScriptFacts, methods: dict[str, Function], device: str) -> Patch:
    patch = facts.script.patch()
    if "backward" not in methods or "torch" not in facts.script.names(ast.Name("torch", ast.Load())):
        patch.spoil()
    for name, decorator in (("forward", "custom_fwd"), ("backward", "custom_bwd")):
        function = methods.get(name)
        if function is not None:
            indent = patch.indent(function)
            line = facts.script.lines[function.lineno - 1]
            patch.line(function.lineno, f'{indent}@torch.amp.{decorator}(device_type="{device}")\n{line}')
    return patch
