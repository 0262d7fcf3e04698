"""Number formats in source: what `torch.float16` names, and in which format an expression's weights are."""

from __future__ import annotations

import ast
from typing import Literal

from halfstep.doctor.code.script import FUNCTIONS, Function, Script, find_argument, find_method_name

Named = Literal["fp16", "bf16", "fp32"]
DTYPES: dict[str, Named] = {
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float": "fp32",
}
_METHODS: dict[str, Named] = {"half": "fp16", "bfloat16": "bf16", "float": "fp32"}
_PASSED_ON = ("cuda", "cpu", "train", "eval", "to", "requires_grad_")
"""Methods of a module that return it, and leave its format alone where no dtype is given."""
_COPIES = frozenset({"copy.deepcopy", "copy.copy", "torch.compile", "torch.nn.DataParallel"})
_COPIES |= {"torch.nn.parallel.DistributedDataParallel"}
_DEEPEST = 12


def find_named_format(script: Script, node: ast.AST | None) -> Named | None:
    """Return the format that a dtype expression certainly names."""
    if node is None:
        return None
    found = {DTYPES.get(name) for name in script.names(node)}
    return found.pop() if len(found) == 1 else None


def find_cast_format(script: Script, call: ast.AST) -> Named | None:
    """Return the format that a call such as `x.half()` or `x.to(torch.float16)` casts to; None for other calls."""
    name = find_method_name(call)
    if not isinstance(call, ast.Call) or name is None:
        return None
    if name in _METHODS and not call.args:
        return _METHODS[name]
    if name != "to":
        return None
    given = [find_argument(call, "dtype"), *call.args]
    return next((found for one in given if (found := find_named_format(script, one))), None)


def find_module_format(script: Script, node: ast.AST, deep: int = _DEEPEST) -> Named | None:
    """Return the 16-bit format in which a module certainly is when this expression has been evaluated."""
    if deep == 0:
        return None
    if not isinstance(node, ast.Call):
        bound = script.bindings(node)
        return find_module_format(script, bound[0], deep - 1) if len(bound) == 1 and bound[0] is not None else None
    if (found := find_cast_format(script, node)) is not None:
        return found if found != "fp32" else None
    if find_method_name(node) in _PASSED_ON and isinstance(node.func, ast.Attribute):
        return find_module_format(script, node.func.value, deep - 1)
    if script.is_one_of(node.func, _COPIES) and node.args:
        return find_module_format(script, node.args[0], deep - 1)
    return _find_loaded_format(script, node) or _find_returned_format(script, node, deep)


def _find_loaded_format(script: Script, call: ast.Call) -> Named | None:
    """Return the format that `from_pretrained(torch_dtype=...)` loads in."""
    if find_method_name(call) != "from_pretrained":
        return None
    found = find_named_format(script, find_argument(call, "torch_dtype") or find_argument(call, "dtype"))
    return found if found != "fp32" else None


def _find_returned_format(script: Script, call: ast.Call, deep: int) -> Named | None:
    """Return the format of what a function of this file returns, where it returns in one place."""
    function = find_function_definition(script, call.func)
    if function is None:
        return None
    returns = [node for node in script.every(ast.Return) if script.scopes[node] is function]
    value = returns[0].value if len(returns) == 1 else None
    return find_module_format(script, value, deep - 1) if value is not None else None


def find_function_definition(script: Script, node: ast.AST) -> Function | None:
    """Return the one function of this file that a name stands for."""
    found = script.named(node.id) if isinstance(node, ast.Name) else []
    return found[0] if len(found) == 1 and isinstance(found[0], FUNCTIONS) else None


def find_class_definition(script: Script, node: ast.AST) -> ast.ClassDef | None:
    """Return the one class of this file that a name stands for."""
    found = script.named(node.id) if isinstance(node, ast.Name) else []
    return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None
