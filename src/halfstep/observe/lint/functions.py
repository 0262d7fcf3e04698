"""Autograd functions of a person's own in which numbers of two formats meet, and nothing says which one is meant."""

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
from halfstep.formats import is_narrow, name_of
from halfstep.observe.code_line import is_own, shown
from halfstep.observe.lint.calls import Tell

ID = "function-mixes-formats"
_MOST = 100_000
"""Nodes of a graph that are looked at: a large model has some thousands."""
_DEEPEST = 20
"""Decorators on one another."""
_TORCHS_DECORATORS = autocast_mode.__file__


class Met(NamedTuple):
    """What a function takes or gives."""

    dtype: torch.dtype
    alone: bool
    """Without dimensions, as a loss or a temperature: in torch such a number takes the format of what it meets."""


class OwnFunctions(TorchFunctionMode):
    """Round forward and backward: looks at the graph behind a loss when backward is asked of it, before it runs.

    Forward of such a function runs under autocast, and backward does not. A matrix product that autocast made narrow
    then meets the wide weight that was saved for it: torch refuses, or computes in fp32 without a word.
    """

    def __init__(self, module_of: Callable[[Any], str], tell: Tell) -> None:
        """`module_of` names the module whose forward made a node of the graph."""
        super().__init__()
        self._module_of, self._tell = module_of, tell
        self._told: set[type] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._look(args[0])
        return func(*args, **(kwargs or {}))

    def _look(self, loss: Tensor) -> None:
        for node, outputs in _reached(loss).items():
            if not isinstance(node, BackwardCFunction):
                continue
            function: Any = node._forward_cls  # type: ignore[attr-defined]
            code = _code(function.forward)
            if function in self._told or code is None or not is_own(code.co_filename):
                continue
            taken, given = _taken(node), _given(node, outputs)
            if _mixed(taken | given) and not _is_protected(node, function, given):
                self._told.add(function)
                line = f"{shown(code.co_filename)}:{code.co_firstlineno}"
                self._tell(_finding(function, taken, given, loss.device.type), self._module_of(node), line)


def _reached(loss: Tensor) -> dict[Any, set[int]]:
    """The nodes behind a loss, each with the numbers of those of its outputs that the loss was computed from."""
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


def _taken(node: Any) -> set[Met]:
    """Of what a gradient goes to, and of weights that are not trained; the graph knows of no other input."""
    edges = [(before, number) for before, number in node.next_functions if before is not None]
    trained = {met for before, number in edges for met in _given(before, (number,))}
    saved = {Met(weight.dtype, weight.ndim == 0) for weight in _weights_saved(node) if weight.is_floating_point()}
    return trained | saved


def _weights_saved(node: Any) -> list[nn.Parameter]:
    """Looked at as they lie there: to unpack what is computed again in backward would compute it."""
    try:
        saved = [getattr(one, "data", None) for one in node._raw_saved_tensors]
    except RuntimeError:  # a backward of the person's own has been here, and left nothing
        return []
    return [tensor for tensor in saved if isinstance(tensor, nn.Parameter)]


def _given(node: Any, outputs: Iterable[int]) -> set[Met]:
    # Of an output that nobody differentiates, such as an index, autograd knows nothing and says fp32.
    every = node._input_metadata
    described = [every[number] for number in outputs]
    return {Met(one.dtype, _is_alone(one)) for one in described if one.dtype.is_floating_point}


def _is_alone(described: Any) -> bool:
    return not described.is_cpp_nested_tensor and not len(described.shape)


def _mixed(met: set[Met]) -> bool:
    return len({is_narrow(one.dtype) for one in met if not one.alone}) == 2


def _is_protected(node: Any, function: Any, given: set[Met]) -> bool:
    """By torch's own decorators, which leave behind whether forward ran under autocast.

    One that was written for another type of device does nothing here, and its function gives narrow numbers.
    """
    under_autocast = getattr(node, "_fwd_used_autocast", None)
    if under_autocast is None:
        return False
    if under_autocast:
        return any(_is_of_torchs_decorators(code) for code in _codes(function.backward))
    return not any(is_narrow(one.dtype) for one in given)


def _is_of_torchs_decorators(code: CodeType) -> bool:
    return code.co_filename == _TORCHS_DECORATORS


def _code(method: Any) -> CodeType | None:
    """As the person wrote it, below any decorators; None of what is not Python."""
    return next(reversed(_codes(method)), None)


def _codes(method: Any) -> list[CodeType]:
    """Of a method and of what it decorates, outermost first."""
    found: list[CodeType] = []
    for _ in range(_DEEPEST):
        found += [method.__code__] if hasattr(method, "__code__") else []
        if not hasattr(method, "__wrapped__"):
            break
        method = method.__wrapped__
    return found


def _finding(function: Any, taken: set[Met], given: set[Met], device_type: str) -> Finding:
    return Finding(
        ID,
        "warning",
        f"{function.__name__} takes {_named(taken)} and gives {_named(given)}: its forward runs under autocast and "
        "its backward does not, and nothing says which format is meant",
        _fix(function, f'device_type="{device_type}"'),
    )


def _fix(function: Any, device: str) -> str:
    # torch's decorators write on the first argument of a forward, which is no context where that is set up apart.
    if function.setup_context is not torch.autograd.Function.setup_context:
        return "keep it in fp32: {island}"
    return (
        f"decorate its backward with torch.amp.custom_bwd({device}) and its forward with torch.amp.custom_fwd({device})"
        ", and cast_inputs=torch.float32 unless it is a matrix product; or keep it in fp32: {island}"
    )


def _named(met: set[Met]) -> str:
    return " and ".join(sorted({name_of(one.dtype) for one in met})) or "no numbers"
