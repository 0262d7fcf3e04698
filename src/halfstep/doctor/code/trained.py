"""Find optimizers over the weights of a module that was cast to fp16 before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.doctor.code.formats import (
    Named,
    find_cast_format,
    find_class_definition,
    find_function_definition,
    find_module_format,
)
from halfstep.doctor.code.order import are_mutually_exclusive, is_earlier_node
from halfstep.doctor.code.script import Script, find_argument, find_method_name, find_receiver, format_variable

_FROZEN = re.compile(
    r"requires_grad|lora|peft|add_adapter|cast_training_params|kbit|freeze|frozen"
    r"|deepspeed|apex|master|fp16_optimizer|colossal|megatron|fairscale|to_fp32|\.data\s*=|stochastic|kahan",
    re.IGNORECASE,
)
"""Words of code in which the weights in 16 bits may not be those that are trained, or have copies in fp32."""


class NarrowOptimizer(NamedTuple):
    """An optimizer of torch over 16-bit weights, and the cast that made them so."""

    optimizer: ast.Call
    module: str
    cast: ast.Call


def find_fp16_optimizers(script: Script) -> Iterator[NarrowOptimizer]:
    """Yield every optimizer over `module.parameters()` where the module certainly is in fp16."""
    yield from find_narrow_optimizers(script, "fp16")


def find_narrow_optimizers(script: Script, format: Named) -> Iterator[NarrowOptimizer]:
    """Yield every optimizer over `module.parameters()` where the module certainly is in a 16-bit format."""
    if not any(word in script.source for word in (".half(", ".bfloat16(", "float16")):
        return
    # A class over parameters: most calls are of something else.
    calls = (call for call in script.calls() if call.args or call.keywords) if "parameters" in script.source else ()
    for call in calls:
        module = _find_optimized_module(script, call)
        cast = _find_cast_before(script, module, call, format) if module is not None else None
        if module is not None and cast is not None and not any(map(_FROZEN.search, script.lines)):
            yield NarrowOptimizer(call, format_variable(module) or script.text(module), cast)


def _find_optimized_module(script: Script, call: ast.Call) -> ast.expr | None:
    """Return m of `torch.optim.X(m.parameters(), ...)`."""
    # A class, by its capital letter: most calls are of something else.
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    names = script.names(call.func) if last[:1].isupper() else ()
    if not names or not all(re.fullmatch(r"torch\.optim\.[A-Z]\w*", name) for name in names):
        return None
    given = find_argument(call, "params", 0)
    is_all = (
        given is not None and find_method_name(given) == "parameters" and isinstance(given, ast.Call) and not given.args
    )
    return (
        given.func.value if is_all and isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) else None
    )


def _find_cast_before(script: Script, module: ast.expr, optimizer: ast.Call, format: Named) -> ast.Call | None:
    """Return the last cast of a module before an optimizer is built over it, if it is one to this format."""
    path, scope = format_variable(module), script.scopes[optimizer]
    # The cast of a module changes it in place, even if the result is unused.
    certain = [
        call for call in script.calls(scope)
        if path is not None and _find_cast_module(call) == path and find_cast_format(script, call)
        and is_earlier_node(call, optimizer)
    ]  # fmt: skip
    if certain:
        last = certain[-1]
        home = script.parents[script.statement(last)]
        # Under a condition that asks for the format, it is one wherever that holds.
        asked = isinstance(home, ast.If) and _ASKS.search(ast.unparse(home.test)) and len(certain) == 1
        is_sure = not are_mutually_exclusive(script, last, optimizer) and (
            home in _list_enclosing_nodes(script, optimizer) or bool(asked)
        )
        return last if find_cast_format(script, last) == format and is_sure else None
    if find_module_format(script, module) == format:
        return _find_narrow_cast(script, module, format)
    return _find_narrow_part(script, module, format)


_ASKS = re.compile(r"fp16|float16|bf16|half|prec", re.IGNORECASE)
_CHAINED = ("to", "cuda", "cpu", "train", "half", "bfloat16", "float", "requires_grad_")


def _find_cast_module(call: ast.Call) -> str | None:
    """Return `model` of `model.to(device).to(torch.bfloat16)`."""
    node: ast.expr = call
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHAINED:
        node = node.func.value
    return format_variable(node) if node is not call else find_receiver(call)


def _list_enclosing_nodes(script: Script, node: ast.AST) -> list[ast.AST]:
    found = []
    current: ast.AST | None = node
    while current is not None:
        found.append(current)
        current = script.parents.get(current)
    return found


def _find_narrow_cast(script: Script, module: ast.expr, format: Named) -> ast.Call | None:
    """Return the cast that makes a module fp16, in a function of this file where that makes it."""
    value = script.value(module)
    function = find_function_definition(script, value.func) if isinstance(value, ast.Call) else None
    for node in ast.walk(function or value):
        if isinstance(node, ast.Call) and find_cast_format(script, node) == format:
            return node
    return value if isinstance(value, ast.Call) else None


def _find_narrow_part(script: Script, module: ast.expr, format: Named) -> ast.Call | None:
    """Return the cast of a part, where a class of this file makes one of its modules in fp16."""
    value = script.value(module)
    owner = find_class_definition(script, value.func) if isinstance(value, ast.Call) else None
    for node in ast.walk(owner) if owner is not None else ():
        is_part = isinstance(node, ast.Assign) and (format_variable(node.targets[0]) or "").startswith("self.")
        made = node.value if is_part and isinstance(node, ast.Assign) else None
        if isinstance(made, ast.Call) and find_cast_format(script, made) == format and _is_new_module(script, made):
            return made
    return None


def _is_new_module(script: Script, cast: ast.Call) -> bool:
    made = cast.func.value if isinstance(cast.func, ast.Attribute) else None
    is_call = isinstance(made, ast.Call)
    return is_call and isinstance(made, ast.Call) and any(n.startswith("torch.nn.") for n in script.names(made.func))
