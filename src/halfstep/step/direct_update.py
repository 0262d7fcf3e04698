"""Step torch's fused Adam and AdamW by their kernel, without the Python of `Optimizer.step` around it.

The kernel gets what `step()` gives it: the optimizer's own parameters, state and options, read anew in each step and
grouped by the same function of torch. No other effect of `step()`, and nobody who observes it, may exist.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.step.direct_backward import IS_TESTED_TORCH, TorchFunctions, is_observed_by_modes

_C: Any = torch._C
# By name: torch.optim may bind the names of its modules to something else.
_adam = sys.modules["torch.optim.adam"]
_optimizer: Any = sys.modules["torch.optim.optimizer"]
_schedule: Any = sys.modules["torch.optim.lr_scheduler"]
_profiler: Any = sys.modules["torch.autograd.profiler"]

_OPTIMIZER, _ADAM = _optimizer.__name__, _adam.__name__
_HEALTH_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""The method that refuses an update inside a graph capture; torch 2.10 to 2.12 have the second name only."""
_HEALTH_CHECK = next((name for name in _HEALTH_CHECKS if hasattr(torch.optim.Optimizer, name)), "")
_METHODS = {"_init_group", "_optimizer_step_code", "_group_tensors_by_device_and_dtype", *_HEALTH_CHECKS}


def _list_functions(kind: type[torch.optim.Optimizer]) -> TorchFunctions:
    grouping = "_group_tensors_by_device_and_dtype"
    step = (
        f"{_OPTIMIZER}.Optimizer.profile_hook_step.<locals>.wrapper",
        f"{_OPTIMIZER}._use_grad_for_differentiable.<locals>._use_grad",
        f"{_ADAM}.Adam.step",
    )
    fallback = f"{_OPTIMIZER}._disable_dynamo_if_unsupported.<locals>.wrapper.<locals>.maybe_fallback"
    region = _profiler.record_function
    return TorchFunctions(
        [
            (kind, "step", step),
            (kind, "_init_group", (f"{_ADAM}.Adam._init_group",)),
            (kind, "_optimizer_step_code", (f"{_OPTIMIZER}.Optimizer._optimizer_step_code",)),
            (kind, _HEALTH_CHECK, (f"{_OPTIMIZER}.Optimizer.{_HEALTH_CHECK}",)),
            (torch.optim.Optimizer, grouping, (f"{_OPTIMIZER}.Optimizer.{grouping}",)),
            (_adam, "adam", (fallback, f"{_ADAM}.adam")),
            (_adam, "_fused_adam", (f"{_ADAM}._fused_adam",)),
            (region, "__enter__", (f"{_profiler.__name__}.record_function.__enter__",)),
        ]
    )


_FUNCTIONS: dict[type[torch.optim.Optimizer], TorchFunctions] = {
    kind: _list_functions(kind) for kind in (torch.optim.Adam, torch.optim.AdamW)
}


def _find_counting_code(code: CodeType) -> CodeType | None:
    """Return the code of the `step` that a schedule puts on its optimizer; None if it does more than is known."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = inner if inner.co_freevars == ("func", "opt_ref") else _find_counting_code(inner)
            if found is not None:
                return found if {*found.co_names} == {"_opt_called", "__get__", "__class__"} else None
    return None


_COUNTING_CODE = _find_counting_code(_schedule.LRScheduler.__init__.__code__)

_GRADIENT, _LAYOUT = attrgetter("grad"), attrgetter("layout")
_HOOKS = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_REFUSED = itemgetter("amsgrad", "capturable", "differentiable")
_OPTIONS = itemgetter("lr", "betas", "weight_decay", "eps", "maximize", "foreach", "decoupled_weight_decay")
_STATE = itemgetter("exp_avg", "exp_avg_sq", "step")
_PARAMETERS, _GRADIENTS, _STATES, _STRIDED = {Tensor, nn.Parameter}, {Tensor}, {dict}, {torch.strided}
_MAPPINGS, _DEVICES = (defaultdict, dict), {"cpu", "cuda"}

_Work = tuple[tuple[Any, ...], list[Any]]
"""The options of a parameter group, and its tensors by device and format."""


def update_directly(optimizer: torch.optim.Optimizer) -> bool:
    """Update the parameters as `optimizer.step()` does; return False, with nothing changed, if only that may do it."""
    functions = _FUNCTIONS.get(type(optimizer))  # never of a subclass
    if functions is None or not IS_TESTED_TORCH or _has_observer(optimizer) or not functions.are_unpatched():
        return False
    own = vars(optimizer)
    counts = "step" in own
    if (counts and not _only_counts(own["step"], optimizer)) or not _METHODS.isdisjoint(own):
        return False
    work = _collect_work(optimizer)
    if work is None:
        return False
    if counts:
        own["_opt_called"] = True
    enabled = torch.is_grad_enabled()
    _C._set_grad_enabled(False)
    try:
        for options, parts in work:
            _call_kernels(options, parts)
    finally:
        _C._set_grad_enabled(enabled)
    return True


def _has_observer(optimizer: Any) -> bool:
    """Return whether other code is called by the step, or sees it, or changes what it does."""
    return bool(
        is_observed_by_modes()
        or any(_HOOKS(optimizer))
        or _optimizer._global_optimizer_pre_hooks
        or _optimizer._global_optimizer_post_hooks
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def _only_counts(step: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's own `step` is the one of a schedule, which notes the call and steps it."""
    if type(step) is not FunctionType or step.__code__ is not _COUNTING_CODE:
        return False
    func, opt_ref = [cell.cell_contents for cell in step.__closure__ or ()]
    return func is type(optimizer).step and opt_ref() is optimizer


def _collect_work(optimizer: torch.optim.Optimizer) -> list[_Work] | None:
    """Return what to call the kernels with, as `step()` collects it; None if that would do anything else."""
    state: Any = optimizer.state
    if type(state) not in _MAPPINGS or optimizer.defaults.get("differentiable", True):
        return None
    found: list[_Work] = []
    try:
        for group in optimizer.param_groups:
            parameters = group["params"]
            options = _OPTIONS(group)
            lr, (beta1, beta2) = options[:2]
            if group["fused"] is not True or any(_REFUSED(group)):
                return None
            if not (isinstance(lr, (float, int)) and isinstance(beta1, float) and isinstance(beta2, float)):
                return None
            gradients, states = list(map(_GRADIENT, parameters)), _list_states(state, parameters)
            if {*map(type, gradients)} != _GRADIENTS or {*map(type, states)} != _STATES:
                return None
            averages, squares, steps = map(list, zip(*map(_STATE, states), strict=True))
            if {*map(type, chain(averages, squares, steps))} != _GRADIENTS or {*map(_LAYOUT, gradients)} != _STRIDED:
                return None
            if not {*map(type, parameters)} <= _PARAMETERS:
                return None
            lists = [parameters, gradients, averages, squares, [], steps]
            parts = _C._group_tensors_by_device_and_dtype(lists, False)
            if not {device.type for device, _ in parts} <= _DEVICES:
                return None
            found.append((options, list(parts.values())))
    except (KeyError, TypeError, ValueError, RuntimeError):
        # Unusable options or state, for which `step()` has an error.
        return None
    return found


def _list_states(state: Mapping[Tensor, Any], parameters: Sequence[Tensor]) -> list[Any]:
    """Return the state of each parameter, None without one; in one pass if they are in the same order."""
    if len(state) == len(parameters) and all(map(is_, state, parameters)):
        return list(state.values())
    return list(map(state.get, parameters))


def _call_kernels(options: tuple[Any, ...], parts: list[Any]) -> None:
    """Count the step and call the kernel for each device and format, as `torch.optim.adam._fused_adam` does."""
    lr, (beta1, beta2), weight_decay, eps, maximize, _, is_decoupled = options
    kernel: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    for (parameters, gradients, averages, squares, largest, steps), _ in parts:
        torch._foreach_add_(steps, 1)
        kernel(
            parameters,
            gradients,
            averages,
            squares,
            largest,
            steps,
            amsgrad=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
            grad_scale=None,
            found_inf=None,
        )
