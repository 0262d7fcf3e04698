"""Record what each module computes in one run, to compare it with the same run in another precision.

Of each module's first call a sample of the output is kept, and its extremes; layers that add up products are also
compared with exact sums (`layer_sums`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from halfstep.formats import Format, is_narrow
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.observe.layer_sums import LAYERS, LayerSums, compute_without_recording, sample_positions
from halfstep.observe.recorder import OUTSIDE

_SAMPLED = 4096
"""Elements of an output that are kept."""
_KEPT = 2**16
"""Elements of one discrete choice that are kept."""


class ModuleCall(NamedTuple):
    """The first call of a module in a run; its tensors are on the device."""

    shape: tuple[int, ...]
    sample: Tensor
    extremes: Tensor
    """The smallest and the largest value of the whole output; NaN if there is one."""


class ModuleValues:
    """A context in which the modules of a model are recorded; `format` is what linear layers round their inputs to.

    With `gradients`, the largest gradient of each output is kept too.
    """

    def __init__(self, model: nn.Module, format: Format, *, gradients: bool = False) -> None:
        self.modules: dict[str, ModuleCall] = {}
        """By path, in the order of the calls."""
        self.choices: dict[str, list[Tensor]] = {}
        """Integers and booleans that were computed from floating point numbers, by function and module."""
        self.gradients: list[Tensor] = []
        self.sums = LayerSums(format)
        self._model, self._with_gradients = model, gradients
        self._chance = _StableRandomMode(self._chose)
        self._running: list[str] = []
        self._last: Tensor | None = None
        self._active = ExitStack()

    @property
    def left_out(self) -> bool:
        """Whether dropout was left out, which the real step has."""
        return self._chance.left_out

    def __enter__(self) -> ModuleValues:
        with ExitStack() as entering:
            for path, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    begins, ends = self._begins(strip_compile_wrappers(path)), self._ends
                    entering.callback(module.register_forward_pre_hook(begins).remove)
                    entering.callback(module.register_forward_hook(ends, with_kwargs=True, always_call=True).remove)
            entering.enter_context(self._chance)
            self._active = entering.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._last = None
        self._active.close()

    def largest(self) -> dict[str, float]:
        """Return the largest value of each output, by path."""
        read = torch.stack([call.extremes[1] for call in self.modules.values()]).tolist() if self.modules else []
        return dict(zip(self.modules, read, strict=True))

    def _begins(self, path: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _inputs: self._running.append(path)

    def _ends(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        path = self._running.pop() if self._running else OUTSIDE
        found = next(filter(_has_numbers, pytree.tree_leaves(output)), None)
        if found is None:
            return
        given: Any = next(iter((*inputs, *keywords.values())), None)
        with compute_without_recording(found):
            if isinstance(module, LAYERS) and found is output and _has_numbers(given):
                self.sums.called(path, module, given, found)
            # A container returns what its last module returned.
            if found is self._last or path in self.modules:
                return
            self._last, out = found, found.detach()
            flat = out.reshape(1) if out.ndim == 0 else out
            at = torch.unravel_index(sample_positions(flat.numel(), _SAMPLED).to(out.device), flat.shape)
            self.modules[path] = ModuleCall(tuple(out.shape), flat[at].float(), torch.stack(torch.aminmax(out)).float())
        if self._with_gradients and found.requires_grad:
            found.register_hook(lambda gradient: self.gradients.append(gradient.detach().abs().amax().float()))

    def _chose(self, name: str, chosen: Tensor) -> None:
        where = self._running[-1] if self._running else OUTSIDE
        kept = chosen.detach().flatten()[:_KEPT].clone()
        self.choices.setdefault(f"{name} in {where or 'the model itself'}", []).append(kept)


class _StableRandomMode(TorchFunctionMode):
    """Makes random numbers independent of the format, and reports discrete choices.

    torch draws other numbers for 16-bit tensors than for fp32. Dropout, whose mask on a GPU depends on the format, is
    left out.
    """

    def __init__(self, chose: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._chose = chose
        self.left_out = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name and args and isinstance(args[0], Tensor):
            p, training = kwargs.get("p", (*args, 0.5)[1]), kwargs.get("training", (*args, True, True)[2])
            self.left_out |= bool(p and training)
            return args[0]
        if func in _DROPOUT_AT:
            place = _DROPOUT_AT[func]
            self.left_out |= bool(kwargs.get("dropout_p", args[place] if len(args) > place else 0.0))
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        if name in ("rand_like", "randn_like") and is_narrow(kwargs.get("dtype") or args[0].dtype):
            return func(args[0], **{**kwargs, "dtype": torch.float32}).to(kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        if func is functional.gumbel_softmax:
            self._chose(name, result.argmax(-1))
        elif any(map(_has_numbers, args)):
            for found in result if isinstance(result, tuple) else (result,):
                dense = isinstance(found, Tensor) and found.layout is torch.strided and found.numel() > 1
                if dense and not found.is_floating_point() and not found.is_complex():
                    self._chose(name, found)
        return result


_DROPOUT_AT = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
"""The place of the argument `dropout_p`."""


def _has_numbers(leaf: Any) -> bool:
    dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta
    return dense and leaf.is_floating_point() and leaf.itemsize > 1 and leaf.numel() > 0
