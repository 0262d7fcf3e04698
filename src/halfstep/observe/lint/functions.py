"""Find the user's autograd functions in which two formats meet without a declaration which one is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from halfstep.finding import Finding
from halfstep.formats import is_narrow, name_dtype
from halfstep.observe.lint.calls import Emit
from halfstep.user_code import is_user_file, shorten_path

ID = "function-mixes-formats"
_MOST = 100_000
"""Nodes of a graph that are visited: a large model has some thousands."""
_DEEPEST = 20
"""Nested decorators."""
_TORCHS_DECORATORS = autocast_mode.__file__


class TensorDtype(NamedTuple):
    """The dtype of an input or output of a function."""

    dtype: torch.dtype
    alone: bool
    """Whether it has no dimensions, like a loss or a temperature: torch promotes it to the dtype of what it meets."""


class OwnFunctionLint(TorchFunctionMode):
    """A function mode around forward and backward: it inspects the graph of a loss before backward runs.

    The forward of such a function runs under autocast, and its backward does not. A matrix product that autocast made
    narrow then meets the wide weight that was saved for it: torch raises, or silently computes in fp32.
    """

    def __init__(self, module_of: Callable[[Any], str], emit: Emit) -> None:
        """Report to `emit`; `module_of` returns the module whose forward made a node of the graph."""
        super().__init__()
        self._module_of, self._emit = module_of, emit
        self._reported: set[type] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._look(args[0])
        return func(*args, **(kwargs or {}))

    def _look(self, loss: Tensor) -> None:
        for node, outputs in _collect_reached_nodes(loss).items():
            if not isinstance(node, BackwardCFunction):
                continue
            function: Any = node._forward_cls  # type: ignore[attr-defined]
            # The user's code below any decorators; None if it is not Python.
            code = next(reversed(_list_code_objects(function.forward)), None)
            if function in self._reported or code is None or not is_user_file(code.co_filename):
                continue
            # torchao rounds both sides to fp8 itself, whatever their formats.
            if function.__module__.startswith("torchao."):
                continue
            taken, given = _collect_taken_inputs(node), _collect_given_outputs(node, outputs)
            mixed = len({is_narrow(one.dtype) for one in taken | given if not one.alone}) == 2
            if mixed and not _is_protected(node, function, given):
                self._reported.add(function)
                line = f"{shorten_path(code.co_filename)}:{code.co_firstlineno}"
                self._emit(
                    _build_mixed_formats_finding(function, taken, given, loss.device.type), self._module_of(node), line
                )


def _collect_reached_nodes(loss: Tensor) -> dict[Any, set[int]]:
    """Return the nodes behind a loss, each with the indices of its outputs that the loss was computed from."""
    reached: dict[Any, set[int]] = {}
    ahead: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    while ahead and len(reached) < _MOST:
        node, number = ahead.pop()
        if node is None:
            continue
        if node not in reached:
            reached[node] = set()
            ahead += node.next_functions
        reached[node].add(number)
    return reached


def _collect_taken_inputs(node: Any) -> set[TensorDtype]:
    """Return the inputs that a gradient goes to, and saved weights that are not trained; the graph knows no others."""
    edges = [(before, number) for before, number in node.next_functions if before is not None]
    trained = {met for before, number in edges for met in _collect_given_outputs(before, (number,))}
    saved = {
        TensorDtype(weight.dtype, weight.ndim == 0)
        for weight in _list_saved_weights(node)
        if weight.is_floating_point()
    }
    return trained | saved


def _list_saved_weights(node: Any) -> list[nn.Parameter]:
    """Return the saved parameters without unpacking them: unpacking would recompute checkpointed activations."""
    try:
        saved = [getattr(one, "data", None) for one in node._raw_saved_tensors]
    except RuntimeError:  # the user has run backward, which freed them
        return []
    return [tensor for tensor in saved if isinstance(tensor, nn.Parameter)]


def _collect_given_outputs(node: Any, outputs: Iterable[int]) -> set[TensorDtype]:
    # For an output without a gradient, such as an index, autograd has no dtype and reports fp32.
    every = node._input_metadata
    described = [every[number] for number in outputs]
    return {
        TensorDtype(one.dtype, not one.is_cpp_nested_tensor and not len(one.shape))
        for one in described
        if one.dtype.is_floating_point
    }


def _is_protected(node: Any, function: Any, given: set[TensorDtype]) -> bool:
    """Return whether torch's own decorators protect it; they record whether forward ran under autocast.

    A decorator for another device type does nothing here, and its function returns narrow values.
    """
    under_autocast = getattr(node, "_fwd_used_autocast", None)
    if under_autocast is None:
        return False
    if under_autocast:
        return any(code.co_filename == _TORCHS_DECORATORS for code in _list_code_objects(function.backward))
    return not any(is_narrow(one.dtype) for one in given)


def _list_code_objects(method: Any) -> list[CodeType]:
    """Return the code of a method and of what it decorates, outermost first."""
    found: list[CodeType] = []
    for _ in range(_DEEPEST):
        found += [method.__code__] if hasattr(method, "__code__") else []
        if not hasattr(method, "__wrapped__"):
            break
        method = method.__wrapped__
    return found


def _build_mixed_formats_finding(
    function: Any, taken: set[TensorDtype], given: set[TensorDtype], device_type: str
) -> Finding:
    return Finding(
        ID,
        "warning",
        f"{function.__name__} takes {_name_formats(taken)} and returns {_name_formats(given)}: its forward runs under "
        "autocast and its backward does not, and nothing says which format is meant",
        _advise_decorators(function, f'device_type="{device_type}"'),
    )


def _advise_decorators(function: Any, device: str) -> str:
    # torch's decorators store on the first argument of forward, which is no context if `setup_context` is separate.
    if function.setup_context is not torch.autograd.Function.setup_context:
        return "keep it in fp32: {island}"
    return (
        f"decorate its backward with torch.amp.custom_bwd({device}) and its forward with torch.amp.custom_fwd({device})"
        ", and cast_inputs=torch.float32 unless it is a matrix product; or keep it in fp32: {island}"
    )


def _name_formats(met: set[TensorDtype]) -> str:
    return " and ".join(sorted({name_dtype(one.dtype) for one in met})) or "no numbers"
