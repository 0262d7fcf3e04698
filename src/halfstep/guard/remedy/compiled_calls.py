"""Modules that call compiled code, made to call their own again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def drop_compiled_calls(model: nn.Module) -> Callable[[], None]:
    """Every module runs eagerly from now on; what is returned undoes that."""
    undo: list[Callable[[], None]] = []
    for module in list(model.modules()):
        if module._compiled_call_impl is not None:
            undo.append(_setting(module, "_compiled_call_impl", module._compiled_call_impl))
            module._compiled_call_impl = None
        elif _is_wrapper(module):
            wrapper: Any = module
            undo.append(_setting(module, "forward", wrapper.forward))
            wrapper.forward = wrapper._orig_mod.__call__
        elif (plain := getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)) is not None:
            undo.append(_setting(module, "forward", module.forward))
            module.forward = plain  # type: ignore[method-assign]

    def restore() -> None:
        for put_back in undo:
            put_back()

    return restore


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(model)` returned; nobody can have one before Dynamo is loaded."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _setting(module: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, value)
