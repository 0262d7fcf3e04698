"""Find optimizers over the weights of a module that was cast to fp16 before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.doctor.code.formats import Named, cast_to, class_named, function_named, module_format
from halfstep.doctor.code.order import exclusive, precedes
from halfstep.doctor.code.script import Script, argument, method, path_of, receiver

_FROZEN = re.compile(
    r"requires_grad|lora|peft|add_adapter|cast_training_params|kbit|freeze|frozen"
    r"|deepspeed|apex|master|fp16_optimizer|colossal|megatron|fairscale|to_fp32|\.data\s*=|stochastic|kahan",
    re.IGNORECASE,
)
"""Words of code in which the weights in 16 bits may not be those that are trained, or have copies in fp32."""


class Fp16Optimizer(NamedTuple):
    """An optimizer of torch over fp16 weights, and the cast that made them so."""

    optimizer: ast.Call
    module: str
    cast: ast.Call


def half_trained(script: Script) -> Iterator[Fp16Optimizer]:
    """Yield every optimizer over `module.parameters()` where the module certainly is in fp16."""
    yield from narrow_trained(script, "fp16")


def narrow_trained(script: Script, format: Named) -> Iterator[Fp16Optimizer]:
    """Yield every optimizer over `module.parameters()` where the module certainly is in a 16-bit format."""
    if not any(word in script.source for word in (".half(", ".bfloat16(", "float16")):
        return
    # A class over parameters: most calls are of something else.
    calls = (call for call in script.calls() if call.args or call.keywords) if "parameters" in script.source else ()
    for call in calls:
        module = _module(script, call)
        cast = _cast_before(script, module, call, format) if module is not None else None
        if module is not None and cast is not None and not any(map(_FROZEN.search, script.lines)):
            yield Fp16Optimizer(call, path_of(module) or script.text(module), cast)


def _module(script: Script, call: ast.Call) -> ast.expr | None:
    """Return m of `torch.optim.X(m.parameters(), ...)`."""
    # A class, by its capital letter: most calls are of something else.
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    names = script.names(call.func) if last[:1].isupper() else ()
    if not names or not all(re.fullmatch(r"torch\.optim\.[A-Z]\w*", name) for name in names):
        return None
    given = argument(call, "params", 0)
    is_all = given is not None and method(given) == "parameters" and isinstance(given, ast.Call) and not given.args
    return (
        given.func.value if is_all and isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) else None
    )


def _cast_before(script: Script, module: ast.expr, optimizer: ast.Call, format: Named) -> ast.Call | None:
    """Return the last cast of a module before an optimizer is built over it, if it is one to this format."""
    path, scope = path_of(module), script.scopes[optimizer]
    # The cast of a module changes it in place, even if the result is unused.
    certain = [
        call for call in script.calls(scope)
        if path is not None and _cast_module(call) == path and cast_to(script, call) and precedes(call, optimizer)
    ]  # fmt: skip
    if certain:
        last = certain[-1]
        home = script.parents[script.statement(last)]
        # Under a condition that asks for the format, it is one wherever that holds.
        asked = isinstance(home, ast.If) and _ASKS.search(ast.unparse(home.test)) and len(certain) == 1
        is_sure = not exclusive(script, last, optimizer) and (
            home in _enclosing_nodes(script, optimizer) or bool(asked)
        )
        return last if cast_to(script, last) == format and is_sure else None
    if module_format(script, module) == format:
        return _find_half_cast(script, module, format)
    return _part_in_half(script, module, format)


_ASKS = re.compile(r"fp16|float16|bf16|half|prec", re.IGNORECASE)
_CHAINED = ("to", "cuda", "cpu", "train", "half", "bfloat16", "float", "requires_grad_")


def _cast_module(call: ast.Call) -> str | None:
    """Return `model` of `model.to(device).to(torch.bfloat16)`."""
    node: ast.expr = call
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHAINED:
        node = node.func.value
    return path_of(node) if node is not call else receiver(call)


def _enclosing_nodes(script: Script, node: ast.AST) -> list[ast.AST]:
    found = []
    current: ast.AST | None = node
    while current is not None:
        found.append(current)
        current = script.parents.get(current)
    return found


def _find_half_cast(script: Script, module: ast.expr, format: Named) -> ast.Call | None:
    """Return the cast that makes a module fp16, in a function of this file where that makes it."""
    value = script.value(module)
    function = function_named(script, value.func) if isinstance(value, ast.Call) else None
    for node in ast.walk(function or value):
        if isinstance(node, ast.Call) and cast_to(script, node) == format:
            return node
    return value if isinstance(value, ast.Call) else None


def _part_in_half(script: Script, module: ast.expr, format: Named) -> ast.Call | None:
    """Return the cast of a part, where a class of this file makes one of its modules in fp16."""
    value = script.value(module)
    owner = class_named(script, value.func) if isinstance(value, ast.Call) else None
    for node in ast.walk(owner) if owner is not None else ():
        is_part = isinstance(node, ast.Assign) and (path_of(node.targets[0]) or "").startswith("self.")
        made = node.value if is_part and isinstance(node, ast.Assign) else None
        if isinstance(made, ast.Call) and cast_to(script, made) == format and _is_new_module(script, made):
            return made
    return None


def _is_new_module(script: Script, cast: ast.Call) -> bool:
    made = cast.func.value if isinstance(cast.func, ast.Attribute) else None
    is_call = isinstance(made, ast.Call)
    return is_call and isinstance(made, ast.Call) and any(n.startswith("torch.nn.") for n in script.names(made.func))
