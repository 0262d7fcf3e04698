"""Find calls that no operation shows: losses that CUDA refuses, a loop inside the loss function, `x[mask] = -1e9`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from halfstep.finding import Finding
from halfstep.observe.lint import masks
from halfstep.user_code import find_running_line

_BCE = (functional.binary_cross_entropy, torch._C._nn.binary_cross_entropy)
_BACKWARD = (Tensor.backward, torch.autograd.backward)
Emit = Callable[[Finding, str, str | None], None]
"""Called with a finding, its module and its line."""


class LossFunctionCalls(TorchFunctionMode):
    """A function mode around the loss function, inside autocast."""

    def __init__(self, device_type: str, emit: Emit) -> None:
        super().__init__()
        self._device_type, self._emit = device_type, emit
        self._hooks = ExitStack()

    def __enter__(self) -> LossFunctionCalls:
        # An optimizer's step is no torch function, so the mode alone does not see it.
        handle: Any = register_optimizer_step_pre_hook(self._steps)
        self._hooks.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BCE and torch.is_autocast_enabled(self._device_type):
            self._emit(build_refused_loss_finding("binary_cross_entropy"), "", find_running_line())
        if (found := masks.find_unseen_overflow(func, args, kwargs or {})) is not None:
            self._emit(found, "", find_running_line())
        if func in _BACKWARD:
            self._emit(_build_loop_finding("backward()", self._describe_autocast()), "", find_running_line())
        return func(*args, **(kwargs or {}))

    def _steps(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._emit(
            _build_loop_finding(f"{type(optimizer).__name__}.step()", self._describe_autocast()),
            "",
            find_running_line(),
        )

    def _describe_autocast(self) -> str:
        return ", under autocast" if torch.is_autocast_enabled(self._device_type) else ""


def build_refused_loss_finding(name: str) -> Finding:
    """Return the finding for a loss that CUDA's autocast refuses."""
    return Finding(
        "loss-refused",
        "error",
        f"{name} runs under autocast, and CUDA's autocast refuses it: a sigmoid in 16 bits is 0 or 1 too early",
        "leave the sigmoid out and use F.binary_cross_entropy_with_logits, or keep it in fp32: "
        "halfstep.island(nn.BCELoss())",
    )


def _build_loop_finding(call: str, under: str) -> Finding:
    return Finding(
        "loop-in-loss",
        "error",
        f"{call} is called inside the loss function{under}: autocast belongs around forward and loss only",
        "return the loss, and leave backward and the update to the loop: stepper.step(loss_fn, batch)",
    )
