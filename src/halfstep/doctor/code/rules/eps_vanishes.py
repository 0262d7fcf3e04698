"""Find small constants in a denominator that are 0 in fp16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.rules.optimizer_eps_vanishes import ZERO_IN_FP16
from halfstep.doctor.code.script import Script, format_variable
from halfstep.doctor.located import LocatedFinding

_NARROW = frozenset(
    f"torch.nn.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d")
)
_MULTIPLIES = frozenset({"torch.matmul", "torch.mm", "torch.bmm", "torch.einsum", "torch.nn.functional.linear"})
_KEEPS = {"abs", "amax", "amin", "max", "min", "mean", "detach", "sqrt", "clamp", "relu", "std"}
"""Methods that compute in the format of their tensor; CUDA's autocast takes norms, sums and powers in fp32."""


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every `x / (y + 1e-8)` where y certainly is in fp16."""
    for node in facts.script.every(ast.BinOp):
        if not isinstance(node.op, ast.Div) or not isinstance(node.right, ast.BinOp):
            continue
        found = _find_vanishing_eps(facts.script, node.right)
        if found is None or not _is_fp16(facts, found[0]):
            continue
        constant, eps = found[1], facts.script.constant(found[1])
        patch = facts.script.patch()
        patch.replace(constant, "1e-4") if isinstance(constant, ast.Constant) else patch.spoil()
        yield facts.script.finding(
            "eps_vanishes",
            "warning",
            node,
            f"`{facts.script.text(node)[:80]}`: {eps:g} is 0 in fp16, in which "
            f"`{facts.script.text(found[0])[:40]}` is computed under autocast: 0 / 0 is NaN",
            "widen first, as in y.float(), or use a number that fp16 can represent, such as 1e-4",
            patch,
        )


def _find_vanishing_eps(script: Script, total: ast.BinOp) -> tuple[ast.expr, ast.expr] | None:
    """Return y and eps of `y + eps`, where eps is 0 in fp16."""
    if not isinstance(total.op, ast.Add):
        return None
    for value, constant in ((total.left, total.right), (total.right, total.left)):
        eps = script.constant(constant)
        if isinstance(eps, float) and 0 < eps <= ZERO_IN_FP16:
            return value, constant
    return None


def _is_fp16(facts: ScriptFacts, node: ast.expr) -> bool:
    """Return whether an expression certainly is a tensor in fp16: the output of a linear layer or a convolution."""
    over = facts.autocasts.over(node)
    if not over or any(one.format != "fp16" or not one.enabled for one in over):
        return False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPS:
        node = node.func.value
    value = facts.script.value(node)
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.MatMult)
    if not isinstance(value, ast.Call) or format_variable(value.func) is None:
        return False
    made = facts.script.value(value.func)
    is_layer = isinstance(made, ast.Call) and facts.script.is_one_of(made.func, _NARROW)
    return is_layer or facts.script.is_one_of(value.func, _MULTIPLIES)
