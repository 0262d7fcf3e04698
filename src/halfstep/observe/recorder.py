"""The one recorder of what torch really runs: every operation, with the module that asked for it.

Observed precision listens to it now; audits, replays and estimates are further listeners, not further recorders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch._ops import OpOverload
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.formats import is_narrow


class _NarrowAttention(TorchFunctionMode):
    """Knows whether an attention that should compute in a narrow format is running."""

    inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (functional.scaled_dot_product_attention, functional.multi_head_attention_forward):
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        # The second one projects first, so that its inputs may be wide; torch hides what it calls from this mode.
        self.inside = is_narrow(query.dtype) or torch.is_autocast_enabled(query.device.type)
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = False


class Operation(NamedTuple):
    """One call that reached a kernel."""

    function: OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    result: Any
    module: str
    """Path of the innermost module that was running; for backward, of the one whose forward made this node."""
    backward: bool
    widened: bool
    """Part of an attention with narrow inputs, which torch itself computes in fp32 where it has no kernel for it."""
    node: int | None = None
    """The number of the autograd node that a forward operation made, or that a backward operation is a part of."""


Listener = Callable[[Operation], None]
Run = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]


def as_it_is(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Run an operation as torch would without a recorder."""
    return function(*arguments, **keywords)


OUTSIDE = "(outside the model)"
_CHECKPOINT = torch.utils.checkpoint.__file__


class Recorder(TorchDispatchMode):
    """Tells a listener of every operation while it is active. Never use it round a compiled function's first call.

    `run` computes the result in another way, as those who emulate a format do; operations it calls are not told.
    """

    def __init__(self, model: nn.Module, listener: Listener, run: Run = as_it_is) -> None:
        super().__init__()
        self._modules = [(as_written(path), module) for path, module in model.named_modules()]
        self._listener, self._run = listener, run
        self._running: list[str] = []
        self._makers: dict[int, tuple[str, bool]] = {}
        self._numbered = 0
        self._hooks: list[Any] = []
        self._attention = _NarrowAttention()

    @property
    def module(self) -> str:
        """Path of the innermost module whose forward is running."""
        return self._running[-1] if self._running else OUTSIDE

    def maker(self, node: Any) -> str:
        """Path of the module whose forward made a node of the graph."""
        return self._makers.get(node._sequence_nr(), (OUTSIDE, False))[0]

    def __enter__(self) -> Recorder:
        for path, module in self._modules:
            # Scripted modules take no hooks; what they do is their parent's.
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._begins(path)))
                self._hooks.append(module.register_forward_hook(self._ends, always_call=True))
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attention.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        (module, widened), backward, node = self._place()
        result = self._run(func, args, kwargs)
        self._listener(Operation(func, args, kwargs, result, module, backward, widened, node))
        return result

    def _place(self) -> tuple[tuple[str, bool], bool, int | None]:
        """Autograd numbers its nodes; the node that is running tells which forward operation it belongs to."""
        running = torch._C._current_autograd_node()
        place = self.module, self._attention.inside
        if running is not None and not self._running:
            made_by = running._sequence_nr()
            place = self._makers.get(made_by, (OUTSIDE, False))
            if not (torch.is_grad_enabled() and _computes_again()):
                return place, True, made_by
        number = torch._C._autograd._get_sequence_nr()
        # An operation that autograd makes no node for, such as counting batches, is not the maker of the last one.
        if number == self._numbered:
            return place, False, None
        self._makers[number - 1] = place
        self._numbered = number
        return place, False, number - 1

    def _begins(self, path: str) -> Callable[[nn.Module, Any], None]:
        def begins(_module: nn.Module, _inputs: Any) -> None:
            self._running.append(path)

        return begins

    def _ends(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()


def as_written(path: str) -> str:
    """Without the wrappers that torch.compile puts round modules."""
    return ".".join(name for name in path.split(".") if name != "_orig_mod")


def _computes_again() -> bool:
    """Whether backward runs a piece of forward, as it does where activations were not kept."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
