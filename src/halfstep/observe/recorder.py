"""The one recorder of what torch really runs: every operation, with the module that asked for it.

Observed precision listens to it now; audits, replays and estimates are further listeners, not further recorders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Operation(NamedTuple):
    """One call that reached a kernel."""

    function: OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    result: Any
    module: str
    """Path of the innermost module that was running; for backward, of the one whose forward made this node."""
    backward: bool


Listener = Callable[[Operation], None]


class Recorder(TorchDispatchMode):
    """Tells a listener of every operation while it is active. Never use it round a compiled function's first call."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        super().__init__()
        self._modules = [(path.replace("_orig_mod.", ""), module) for path, module in model.named_modules()]
        self._listener = listener
        self._running: list[str] = []
        self._makers: dict[int, str] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        for path, module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._begins(path)))
            self._hooks.append(module.register_forward_hook(self._ends, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        module, backward = self._place()
        result = func(*args, **kwargs)
        self._listener(Operation(func, args, kwargs, result, module, backward))
        return result

    def _place(self) -> tuple[str, bool]:
        """Autograd numbers its nodes; the node that is running tells which forward operation it belongs to."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._running:
            return self._makers.get(node._sequence_nr(), ""), True
        module = self._running[-1] if self._running else ""
        self._makers[torch._C._autograd._get_sequence_nr() - 1] = module
        return module, False

    def _begins(self, path: str) -> Callable[[nn.Module, Any], None]:
        def begins(_module: nn.Module, _inputs: Any) -> None:
            self._running.append(path)

        return begins

    def _ends(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()
