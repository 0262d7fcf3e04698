"""Compare layers with exact sums of what they were given: their results in forward, their gradients in backward.

A result or a gradient of a linear layer, a convolution or a norm is a sum of products. Computed again in fp32 from the
very numbers that the layer was given, it differs from the layer's own by roundings of the format, each relative to a
term of the sum: the root of the sum of the squared terms, times the format's epsilon, bounds the difference. Errors of
other layers do not enter, however much they are amplified. A sum that cancels, such as the gradient of a bias in front
of a BatchNorm, is small against its terms: it is rounding noise, and zero is as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from halfstep.formats import Format
from halfstep.precision.converted import find_layer_format, unwrap_weight

_ROWS, _COLUMNS, _CHANNELS, _PART = 32, 256, 16, 32
"""Rows and columns of a linear layer's results; channels of a convolution's; the part of a weight's rows."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm)
LAYERS = (nn.Linear, *_CONVOLUTIONS, *_NORMS)
RESULT, INPUT, PARAMETER = "result", "input", "parameter"


class ComparedPart(NamedTuple):
    """The compared numbers: the results of a layer, the gradient of its input, or that of a parameter."""

    kind: str
    name: str
    """The path of the layer, or the name of the parameter."""


class SumErrors(NamedTuple):
    """How far sampled numbers of a layer are from the exact sums."""

    error: float
    """The root mean square of the difference, as a share of the sums and of the terms that were added up."""
    slope: float
    """The difference as a share of the sum: 0.5 where the number is half too large."""
    doubt: float
    """The standard error of the slope."""
    zeros: float
    """The share of numbers that are zero, or the bias alone, where the sum is not small against its terms."""
    signal: float
    """The sums as a share of the root of the sum of squared terms: 1 for independent terms, 0 if they cancel."""
    roundings: float
    """The additions that the layer may round: one a call, one a sample in convolutions, one a row in norms."""


class _ExpectedSums:
    """The exact sums of one tensor, added up over the calls of its layers."""

    def __init__(self, format: Format) -> None:
        self._format, self.places, self.calls, self._roundings = format, slice(None), 0, 0
        self._exact = self._spread = torch.zeros(())

    def add(self, places: Any, exact: Tensor, spread: Tensor, roundings: int = 1) -> None:
        self.places, self.calls, self._roundings = places, self.calls + 1, self._roundings + roundings
        self._exact, self._spread = (exact, spread) if self.calls == 1 else (self._exact + exact, self._spread + spread)

    def compared(self, got: Tensor) -> Tensor:
        return _compare_sums(
            got[self.places], self._exact, self._spread, torch.zeros(()), self._format, self._roundings
        )


class LayerSums:
    """The comparisons of one run; `format` is what layers round their inputs to."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._numbers: dict[ComparedPart, Tensor] = {}
        self._parameters: dict[int, _ExpectedSums] = {}
        self._inputs: dict[int, _ExpectedSums] = {}
        self._unknown: set[int] = set()
        """Parameters with a term that is not known."""

    def read(self) -> dict[ComparedPart, SumErrors]:
        """Return the comparisons, which waits for the device."""
        read = torch.stack(list(self._numbers.values())).tolist() if self._numbers else []
        return {part: SumErrors(*numbers) for part, numbers in zip(self._numbers, read, strict=True)}

    def called(self, path: str, layer: Any, given: Tensor, output: Tensor) -> None:
        """Compare the results of a layer's first call, and expect its gradients."""
        format, part = find_layer_format(layer, self._format), ComparedPart(RESULT, path)
        if not _has_plain_shapes(layer, given, output):
            self._unknown.update(map(id, layer._parameters.values()))
            return
        if not isinstance(layer, _NORMS) and part not in self._numbers:
            found = _compare_results(layer, given.detach(), output.detach(), format)
            self._numbers.update({} if found is None else {part: found})
        if not output.requires_grad:
            return
        version, key = given._version, id(given)
        output.register_hook(lambda gradient: self._add_gradient(layer, given, version, gradient))
        if isinstance(layer, nn.Linear) and given.requires_grad and key not in self._inputs:
            self._inputs[key] = _ExpectedSums(format)
            given.register_hook(lambda gradient: self._compare_returned(path, key, gradient))

    def compare_gradients(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Compare the gradients of parameters after backward; none is the same as zeros."""
        for name, parameter in named:
            if id(parameter) in self._parameters and id(parameter) not in self._unknown:
                with compute_without_recording(parameter):
                    got = (
                        torch.zeros_like(unwrap_weight(parameter))
                        if parameter.grad is None
                        else unwrap_weight(parameter.grad)
                    )
                    self._numbers[ComparedPart(PARAMETER, name)] = self._parameters[id(parameter)].compared(got)

    def _add_gradient(self, layer: Any, given: Tensor, version: int, gradient: Tensor) -> None:
        """Add the terms of one call, when the gradient of its output arrives."""
        own, format = (
            [layer._parameters.get(name) for name in ("weight", "bias")],
            find_layer_format(layer, self._format),
        )
        weight, bias = (p if p is not None and p.requires_grad else None for p in own)
        with compute_without_recording(gradient):
            if given._version != version:
                self._unknown.update(map(id, own))
                return
            # Norms compute in fp32 from what they are given; autocast rounds for the others.
            is_norm, d = isinstance(layer, _NORMS), gradient.detach().float()
            x = given.detach().float() if is_norm else _round_to(given.detach(), format)
            if isinstance(layer, nn.Linear):
                x, d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
            # Some kernels add up rows (of norms) and samples (of convolutions) in the format.
            added = len(d) if isinstance(layer, _CONVOLUTIONS) else 1
            roundings = d.numel() // layer.weight.numel() if is_norm and weight is not None else added
            if bias is not None:
                terms = slice(None), _sum_except_bias(layer, d), _sum_except_bias(layer, d.square())
                self._parameters.setdefault(id(bias), _ExpectedSums(format)).add(*terms, roundings)
            if weight is not None:
                terms = _compute_weight_terms(layer, x, d)
                self._parameters.setdefault(id(weight), _ExpectedSums(format)).add(*terms, roundings)
            if id(given) in self._inputs and isinstance(layer, nn.Linear):
                rows, w = (
                    sample_positions(len(d), _ROWS).to(d.device),
                    _round_to(unwrap_weight(layer.weight).detach(), format),
                )
                self._inputs[id(given)].add(rows, d[rows] @ w, d[rows].square() @ w.square())

    def _compare_returned(self, path: str, key: int, gradient: Tensor) -> None:
        """Compare the gradient that a linear layer returns, where nothing else is given the same input."""
        expected = self._inputs.pop(key, None)
        if expected is not None and expected.calls == 1:
            with compute_without_recording(gradient):
                got = gradient.detach().reshape(-1, gradient.shape[-1])
                self._numbers.setdefault(ComparedPart(INPUT, path), expected.compared(got))


@contextmanager
def compute_without_recording(tensor: Tensor) -> Iterator[None]:
    """Compute in fp32, without a graph, and unseen by function modes, which would record it as the model's."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield


@cache
def sample_positions(length: int, most: int) -> Tensor:
    """Return positions in a row of this length: all of them, or a random choice that is always the same."""
    if length <= most:
        return torch.arange(length)
    return torch.randint(length, (most,), generator=torch.Generator().manual_seed(length)).sort().values


def _has_plain_shapes(layer: Any, given: Tensor, output: Tensor) -> bool:
    """Return whether the shapes are those of a plain layer and a batch."""
    if isinstance(layer, _NORMS):
        return output.shape == given.shape
    shape = layer.weight.shape
    if isinstance(layer, nn.Linear):
        return bool(given.shape[-1:] == shape[1:] and output.shape == (*given.shape[:-1], shape[0]))
    return bool(given.ndim == output.ndim == len(shape) and output.shape[1] == shape[0])


def _compare_results(layer: Any, given: Tensor, output: Tensor, format: Format) -> Tensor | None:
    """Compare the results of a linear layer or a convolution; None if it computes another shape."""
    weight, bias = (
        unwrap_weight(layer.weight).detach(),
        None if layer.bias is None else unwrap_weight(layer.bias).detach(),
    )
    if isinstance(layer, nn.Linear):
        given, output = given.reshape(-1, given.shape[-1]), output.reshape(-1, len(weight))
        rows = sample_positions(len(given), min(_ROWS, max(2, len(given) // 16))).to(weight.device)
        most, given, output = _COLUMNS, given[rows], output[rows]
    else:
        most, given, output = _CHANNELS if layer.groups == 1 else len(weight), given[:1], output[:1]
    columns = sample_positions(len(weight), most).to(weight.device)
    # Rounded as the layer rounds them: what remains is the rounding of its result.
    x, w = _round_to(given, format), _round_to(weight[columns], format)
    product, spread = _apply_layer_weight(layer, x, w), _apply_layer_weight(layer, x.square(), w.square())
    if product.shape != output[:, columns].shape:
        return None
    added = w.new_zeros(len(w)) if bias is None else _round_to(bias[columns], format)
    return _compare_sums(output[:, columns], product, spread, added.view(-1, *[1] * (product.ndim - 2)), format, 1)


def _compute_weight_terms(layer: Any, x: Tensor, d: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return which rows of a weight's gradient are known, their sums, and the sums of squared terms."""
    if isinstance(layer, _NORMS):
        terms = d * _normalize_input(layer, x)
        return slice(None), _sum_except_bias(layer, terms), _sum_except_bias(layer, terms.square())
    most = max(4, len(layer.weight) // _PART)
    rows = sample_positions(
        len(layer.weight), most if isinstance(layer, nn.Linear) or layer.groups == 1 else len(layer.weight)
    )
    rows, d = rows.to(d.device), d[:, rows.to(d.device)]
    if isinstance(layer, nn.Linear):
        return rows, d.T @ x, d.T.square() @ x.square()
    with torch.enable_grad():
        w = unwrap_weight(layer.weight).detach()[rows].float().requires_grad_()
        exact = torch.autograd.grad(_apply_layer_weight(layer, x, w), w, d)[0]
        return rows, exact, torch.autograd.grad(_apply_layer_weight(layer, x.square(), w), w, d.square())[0]


def _sum_except_bias(layer: Any, terms: Tensor) -> Tensor:
    """Sum over everything but the elements of a bias."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return terms.reshape(-1, *layer.normalized_shape).sum(0)
    return terms.transpose(0, 1).flatten(1).sum(1)


def _normalize_input(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, nn.LayerNorm):
        return functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return functional.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return functional.group_norm(x, layer.num_groups, eps=layer.eps)
    own = layer.training or layer.running_mean is None
    mean, variance = (None, None) if own else (layer.running_mean.float(), layer.running_var.float())
    return functional.batch_norm(x, mean, variance, training=own, eps=layer.eps)


def _apply_layer_weight(layer: Any, inputs: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = inputs @ weight.T if isinstance(layer, nn.Linear) else layer._conv_forward(inputs, weight, None)
    return found


def _round_to(tensor: Tensor, format: Format) -> Tensor:
    return tensor.float() if format.dtype is None else tensor.to(format.dtype).float()


def _compare_sums(
    got: Tensor, product: Tensor, spread: Tensor, added: Tensor, format: Format, roundings: int
) -> Tensor:
    """Return the numbers of Sums: `got` against `product + added`, whose squared terms add up to `spread`."""
    exact, added = product + added.to(product.device), added.to(product.device)
    usable = exact.isfinite() & spread.isfinite() & got.isfinite()
    number = usable.sum().clamp(min=1)
    difference, product = torch.where(usable, got.float() - exact, 0.0), torch.where(usable, product, 0.0)
    spread = torch.where(usable, spread, 0.0)
    size = torch.where(usable, exact.square() + spread + format.smallest_normal**2, 0.0).sum().sqrt()
    error, energy = difference.square().sum().sqrt(), product.square().sum().sqrt().clamp(min=1e-18)
    slope = (difference / energy * (product / energy)).sum()
    # The sum is lost neither in the rounding of the bias, nor in cancellation, nor by underflow.
    least = torch.maximum(4 * format.epsilon * added.abs(), 0.1 * spread.sqrt()).clamp(min=format.smallest_normal)
    zeros = (usable & (product.abs() > least) & (got == added.to(got.dtype))).sum() / number
    shares = [error / size.clamp(min=1e-18), slope, error / energy / number.sqrt(), zeros]
    return torch.stack([*shares, energy / spread.sum().sqrt().clamp(min=1e-18), number.new_tensor(roundings).float()])
