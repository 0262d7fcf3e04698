"""Record what each module computes in one run, to compare it with the same run in another precision.

Of each module's first call a sample of the output is kept, and its extremes. Linear layers and convolutions are also
compared with the exact product of the inputs that they were given: that comparison is local, so errors of the modules
before them, and other discrete choices, do not enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from halfstep.formats import FP8_E4M3, Format, is_narrow
from halfstep.observe.recorder import OUTSIDE, as_written

_SAMPLED, _ROWS, _COLUMNS, _CHANNELS = 4096, 32, 256, 16
"""Elements of an output; rows and columns of a linear layer's; channels of a convolution's."""
_KEPT = 2**16
"""Elements of one discrete choice that are kept."""
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FP8 = Format("fp8", None, FP8_E4M3.largest, 0.0, FP8_E4M3.epsilon)
"""fp8 with a scale: no dtype rounds to it, and what is small in itself does not underflow."""


class Product(NamedTuple):
    """How far sampled results of a linear layer or a convolution are from the exact product of its inputs."""

    error: float
    """The root mean square of the difference, as a share of the results and of the products that were added up."""
    slope: float
    """The difference as a share of the product: 0.5 where the result is half too large."""
    doubt: float
    """The standard error of the slope."""
    zeros: float
    """The share of results that are zero, or the bias alone, where the product is not small."""


class ModuleCall(NamedTuple):
    """The first call of a module in a run; its tensors are on the device."""

    shape: tuple[int, ...]
    sample: Tensor
    extremes: Tensor
    """The smallest and the largest value of the whole output; NaN if there is one."""
    product: Tensor | None
    """The numbers of a `Product`."""


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
        self._model, self._format, self._with_gradients = model, format, gradients
        self._chance = _SameChance(self._chose)
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
                    begins, ends = self._begins(as_written(path)), self._ends
                    entering.callback(module.register_forward_pre_hook(begins).remove)
                    entering.callback(module.register_forward_hook(ends, with_kwargs=True, always_call=True).remove)
            entering.enter_context(self._chance)
            self._active = entering.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._last = None
        self._active.close()

    def products(self) -> dict[str, Product]:
        """Return the comparisons of linear layers and convolutions, by path."""
        known = {path: call.product for path, call in self.modules.items() if call.product is not None}
        read = torch.stack(list(known.values())).tolist() if known else []
        return {path: Product(*numbers) for path, numbers in zip(known, read, strict=True)}

    def largest(self) -> dict[str, float]:
        """Return the largest value of each output, by path."""
        read = torch.stack([call.extremes[1] for call in self.modules.values()]).tolist() if self.modules else []
        return dict(zip(self.modules, read, strict=True))

    def _begins(self, path: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _inputs: self._running.append(path)

    def _ends(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        path = self._running.pop() if self._running else OUTSIDE
        found = next(filter(_has_numbers, pytree.tree_leaves(output)), None)
        # A container returns what its last module returned.
        if found is None or found is self._last or path in self.modules:
            return
        self._last = found
        given: Any = next(iter((*inputs, *keywords.values())), None)
        # Without the function mode, which would record these operations as the model's.
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast(found.device.type, enabled=False):
            out, product = found.detach(), None
            if isinstance(module, _PRODUCTS) and found is output and _has_numbers(given):
                product = _compared(module, given.detach(), out, format_in(module, self._format))
            flat = out.reshape(1) if out.ndim == 0 else out
            places = torch.unravel_index(_places(flat.numel(), _SAMPLED).to(out.device), flat.shape)
            extremes = torch.stack(torch.aminmax(out)).float()
            self.modules[path] = ModuleCall(tuple(out.shape), flat[places].float(), extremes, product)
        if self._with_gradients and found.requires_grad:
            found.register_hook(lambda gradient: self.gradients.append(gradient.detach().abs().amax().float()))

    def _chose(self, name: str, chosen: Tensor) -> None:
        where = self._running[-1] if self._running else OUTSIDE
        kept = chosen.detach().flatten()[:_KEPT].clone()
        self.choices.setdefault(f"{name} in {where or 'the model itself'}", []).append(kept)


class _SameChance(TorchFunctionMode):
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
                if _is_choice(found):
                    self._chose(name, found)
        return result


_DROPOUT_AT = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
"""The place of the argument `dropout_p`."""


def _is_choice(found: Any) -> bool:
    dense = isinstance(found, Tensor) and found.layout is torch.strided and found.numel() > 1
    return dense and not found.is_floating_point() and not found.is_complex()


def _has_numbers(leaf: Any) -> bool:
    dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta
    return dense and leaf.is_floating_point() and leaf.itemsize > 1 and leaf.numel() > 0


@cache
def _places(length: int, most: int) -> Tensor:
    """Return positions in a row of this length: all of them, or a random choice that is always the same."""
    if length <= most:
        return torch.arange(length)
    return torch.randint(length, (most,), generator=torch.Generator().manual_seed(length)).sort().values


# -- exact products ---------------------------------------------------------------------------------------------------


def _compared(module: Any, given: Tensor, output: Tensor, format: Format) -> Tensor | None:
    """Return the numbers of a Product; None where the shapes are not those of a plain layer."""
    weight, bias = plain(module.weight).detach(), None if module.bias is None else plain(module.bias).detach()
    if isinstance(module, nn.Linear):
        if given.shape[-1:] != weight.shape[1:] or output.shape != (*given.shape[:-1], len(weight)):
            return None
        given, output = given.reshape(-1, given.shape[-1]), output.reshape(-1, len(weight))
        rows = _places(len(given), min(_ROWS, max(2, len(given) // 16))).to(weight.device)
        most, given, output = _COLUMNS, given[rows], output[rows]
    else:
        if given.ndim != weight.ndim or output.ndim != given.ndim or output.shape[1] != len(weight):
            return None
        most, given, output = _CHANNELS if module.groups == 1 else len(weight), given[:1], output[:1]
    columns = _places(len(weight), most).to(weight.device)
    got = output[:, columns]
    # Rounded as the layer rounds them: what remains is the rounding of its result.
    a, w = _rounded(given, format), _rounded(weight[columns], format)
    product, spread = _multiplied(module, a, w), _multiplied(module, a.square(), w.square())
    if product.shape != got.shape:
        return None
    added = w.new_zeros(len(w)) if bias is None else _rounded(bias[columns], format)
    added = added.view(-1, *[1] * (product.ndim - 2))
    return _judged(got, product, spread, added, format)


def _judged(got: Tensor, product: Tensor, spread: Tensor, added: Tensor, format: Format) -> Tensor:
    exact = product + added
    usable = exact.isfinite() & spread.isfinite() & got.isfinite()
    number = usable.sum().clamp(min=1)
    difference, product = torch.where(usable, got.float() - exact, 0.0), torch.where(usable, product, 0.0)
    size = torch.where(usable, exact.square() + spread + format.smallest_normal**2, 0.0).sum().sqrt()
    error, energy = difference.square().sum().sqrt(), product.square().sum().sqrt().clamp(min=1e-18)
    slope = (difference / energy * (product / energy)).sum()
    # The product is lost neither in the rounding of the bias, nor in cancellation, nor by underflow.
    least = torch.maximum(4 * format.epsilon * added.abs(), 0.1 * spread.sqrt()).clamp(min=format.smallest_normal)
    zeros = (usable & (product.abs() > least) & (got == added.to(got.dtype))).sum() / number
    return torch.stack([error / size.clamp(min=1e-18), slope, error / energy / number.sqrt(), zeros])


def _rounded(tensor: Tensor, format: Format) -> Tensor:
    return tensor.float() if format.dtype is None else tensor.to(format.dtype).float()


def _multiplied(module: Any, inputs: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = inputs @ weight.T if isinstance(module, nn.Linear) else module._conv_forward(inputs, weight, None)
    return found


# -- converted layers -------------------------------------------------------------------------------------------------


def is_converted(module: nn.Module) -> bool:
    """Return whether torchao converted a linear layer to fp8: its class, or the class of its weight."""
    kinds = (type(module), *map(type, module._parameters.values()))
    return isinstance(module, nn.Linear) and any(kind.__module__.startswith("torchao.") for kind in kinds)


def format_in(module: nn.Module, format: Format) -> Format:
    """Return the format that a layer computes in, in a run of this format."""
    return _FP8 if is_converted(module) and "forward" not in vars(module) else format


@contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Compute converted layers as plain ones, on the same weights, inside the context."""
    before = [(layer, dict(layer._parameters)) for layer in model.modules() if is_converted(layer)]
    for layer, parameters in before:
        layer.forward = MethodType(nn.Linear.forward, layer)  # type: ignore[method-assign, assignment]
        wrapped = {name: p for name, p in parameters.items() if p is not None and plain(p) is not p}
        layer._parameters.update({name: nn.Parameter(plain(p).detach()) for name, p in wrapped.items()})
    try:
        yield
    finally:
        for layer, parameters in before:
            del layer.forward
            layer._parameters.update(parameters)


def plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a weight that a conversion has wrapped, such as torchao's for mxfp8."""
    inner = getattr(tensor, "_data", None)
    return inner if isinstance(inner, Tensor) else tensor
