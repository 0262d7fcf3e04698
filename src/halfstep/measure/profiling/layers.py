"""What a step computes, by layer: the format of its work, and layers whose channels are no multiple of 8."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from halfstep.measure.profiling.facts import Work
from halfstep.observe.flops import computed_in, flops
from halfstep.observe.recorder import Operation, Recorder
from halfstep.precision.island import islands

ALIGNED = 8
_WIDE = ("fp32", "fp64", "tf32")


@dataclass(frozen=True)
class Layer:
    """A layer that ran, and what came into it."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format
    needs_gradient: bool = True
    """What came in; the first layer of a model computes none for its input."""


@dataclass(frozen=True)
class Looked:
    """The work of one step, its layers with channels, and the FLOPs of each."""

    work: Work
    layers: tuple[Layer, ...]
    flops: dict[str, int]
    wide: frozenset[str] = frozenset()
    """Modules that did work in fp32."""


def look(model: nn.Module, step: Callable[[], object]) -> Looked:
    """Watch one step. Compiled code runs as it was written meanwhile, and is compiled as before afterwards."""
    by_format: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    wide_modules: set[str] = set()
    declared = tuple(islands(model))

    def listen(operation: Operation) -> None:
        work = flops(operation)
        if not work or (operation.widened and computed_in(operation) == "fp32"):
            return
        found = computed_in(operation)
        by_format[found] += work
        by_module[operation.module] += work
        if found in _WIDE:
            wide[_whose(operation.module, declared)] += work
            wide_modules.add(operation.module)

    layers: dict[str, Layer] = {}
    with ExitStack() as watching:
        if "torch._dynamo" in sys.modules:
            watching.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            if channels(module):
                handle = module.register_forward_hook(_noting(layers, name.replace("_orig_mod.", "")))
                watching.callback(handle.remove)
        watching.enter_context(Recorder(model, listen))
        step()
    work = Work(dict(by_format), dict(wide.most_common()), declared)
    return Looked(work, tuple(layers.values()), dict(by_module), frozenset(wide_modules))


def channels(module: nn.Module) -> tuple[int, int] | None:
    """In and out, of layers whose work is a matrix product over both; None for others, as grouped ones."""
    if "forward" in vars(module) or not type(module).forward.__module__.startswith("torch.nn."):
        return None  # who knows what it computes
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, _ConvNd) and module.groups == 1:
        return module.in_channels, module.out_channels
    return None


def misaligned(
    looked: Looked, least: float = 0.05, *, without: Collection[str] = ()
) -> list[tuple[list[Layer], float]]:
    """Layers with channels that are no multiple of 8, the same ones together, with their share of FLOPs, most first."""
    total = sum(looked.flops.values())
    groups: dict[Any, list[Layer]] = defaultdict(list)
    for layer in looked.layers:
        pair = channels(layer.module)
        if pair and layer.name not in without and any(count % ALIGNED for count in pair):
            groups[_same(layer)].append(layer)
    shares = [
        (group, sum(looked.flops.get(layer.name, 0) for layer in group) / max(total, 1)) for group in groups.values()
    ]
    return sorted([(group, share) for group, share in shares if share >= least], key=lambda pair: -pair[1])


def _same(layer: Layer) -> tuple[Any, ...]:
    module: Any = layer.module
    geometry = tuple(str(getattr(module, name, "")) for name in ("kernel_size", "stride", "padding", "dilation"))
    return (
        type(module).__name__,
        channels(module),
        geometry,
        (layer.shape, layer.dtype, layer.layout),
        _gradients(layer),
    )


def _gradients(layer: Layer) -> tuple[bool, ...]:
    return layer.needs_gradient, *(parameter.requires_grad for parameter in layer.module.parameters())


def _whose(module: str, declared: tuple[str, ...]) -> str:
    for path in declared:
        if path and (module == path or module.startswith(f"{path}.")):
            return path
    return module or "(the model itself)"


def _noting(layers: dict[str, Layer], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, inputs: Any, _output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            given = inputs[0]
            layers[name] = Layer(name, module, tuple(given.shape), given.dtype, layout_of(given), given.requires_grad)

    return note


def layout_of(tensor: Tensor) -> torch.memory_format:
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return layout
    return torch.contiguous_format
