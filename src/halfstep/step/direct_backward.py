"""Run backward by torch's engine, without the Python of `Tensor.backward` around it, where the effect is the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_TESTED = ((2, 10), (2, 15))
"""The first and the last torch whose own Python was compared with the calls here and in `direct_update`."""
_C: Any = torch._C
_NEEDED = ("_len_torch_function_stack", "_len_torch_dispatch_stack", "_are_functorch_transforms_active")

IS_TESTED_TORCH = (
    _TESTED[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= _TESTED[1]
    and all(hasattr(_C, name) for name in (*_NEEDED, "_group_tensors_by_device_and_dtype", "_set_grad_enabled"))
    and hasattr(_C._autograd, "_profiler_enabled")
    and hasattr(torch.autograd, "_engine_run_backward")
)


class TorchFunctions:
    """Functions of torch that a direct call leaves out, each with the code that the tested versions have for it."""

    def __init__(self, functions: Sequence[tuple[object, str, tuple[str, ...]]]) -> None:
        self._owners = [owner for owner, _, _ in functions]
        self._names = [name for _, name, _ in functions]
        self._codes = [codes for _, _, codes in functions]
        self._known: list[Any] = []

    def are_unpatched(self) -> bool:
        """Return whether all names are still bound to torch's own functions."""
        found = list(map(getattr, self._owners, self._names, repeat(None)))
        if found == self._known:
            return True
        if list(map(_list_codes, found)) != self._codes:
            return False
        self._known = found
        return True


_NOT_COMPILED = "torch._dynamo.eval_frame.DisableContext.__call__.<locals>._fn"
"""What the first `torch.compile` of a process puts around functions of optimizers; it has an effect on tracing only."""


def _list_codes(function: Any) -> tuple[str, ...]:
    """Return module and name of a function's code, and of the code of each function that it decorates."""
    found = []
    while type(function) is FunctionType:
        found.append(f"{function.__globals__['__name__']}.{function.__code__.co_qualname}")
        function = vars(function).get("__wrapped__")
    return tuple(name for name in found if name != _NOT_COMPILED)


def is_observed_by_modes() -> bool:
    """Return whether a mode, a transform, the compiler or a profiler of torch observes calls of torch's functions."""
    return bool(
        torch.compiler.is_compiling()
        or _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _C._are_functorch_transforms_active()
        or _C._autograd._profiler_enabled()  # in this thread
        or torch.autograd.profiler._is_profiler_enabled  # in any
    )


_FUNCTIONS = TorchFunctions(
    [
        (Tensor, "backward", ("torch._tensor.Tensor.backward",)),
        (torch.autograd, "backward", ("torch.autograd.backward",)),
        (torch.autograd, "_make_grads", ("torch.autograd._make_grads",)),
    ]
)


def run_backward(loss: Any) -> None:
    """Do what `loss.backward()` does: by its last call if nothing else of it has an effect, or else as a whole."""
    if not _can_call_engine(loss):
        loss.backward()
        return
    # Not kept for the next pass: hooks may write it through `.data`, which its version does not show, and autograd may
    # give its memory to the gradient of a parameter without dimensions.
    one = torch.ones_like(loss, memory_format=torch.preserve_format)
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    engine((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _can_call_engine(loss: Any) -> bool:
    return (
        type(loss) is Tensor
        and IS_TESTED_TORCH
        and not is_observed_by_modes()
        and not torch.is_anomaly_enabled()
        and _FUNCTIONS.are_unpatched()
        and "backward" not in vars(loss)
        # Otherwise backward raises an error, or the engine does.
        and loss.requires_grad
        and loss.is_floating_point()
        and loss.numel() == 1
    )
