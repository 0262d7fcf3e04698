"""What padding would gain, measured: a layer as it is against the same with its channels at the next multiple of 8."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep import clock
from halfstep.measure.profiling.facts import Misaligned
from halfstep.measure.profiling.layers import ALIGNED, Layer, channels, layout_of
from halfstep.measure.stopwatch import Stopwatch
from halfstep.precision.precision import Precision

_PAIRS, _FEWEST = 100, 16


def next_multiple(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def padded(module: Any) -> nn.Module:
    """A layer of the same kind with random weights and channels that are multiples of 8."""
    before = channels(module)
    assert before is not None, "only layers with channels are padded"
    inward, outward = map(next_multiple, before)
    bias, place = module.bias is not None, {"device": module.weight.device, "dtype": module.weight.dtype}
    if isinstance(module, nn.Linear):
        return _trained_alike(module, nn.Linear(inward, outward, bias, **place))
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    more = {name: getattr(module, name) for name in names}
    if module.transposed:
        more["output_padding"] = module.output_padding
    kind = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn"))
    made: Any = kind(inward, outward, bias=bias, **more, **place)
    layout = layout_of(module.weight)
    return _trained_alike(module, made if layout is torch.contiguous_format else made.to(memory_format=layout))


def _trained_alike(module: nn.Module, made: nn.Module) -> nn.Module:
    """A weight that is frozen costs no gradient."""
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(getattr(module, name).requires_grad)
    return made


def measured(
    layers: list[Layer], share: float, precision: Precision, device: torch.device, seconds: float
) -> Misaligned:
    """Forward and backward of one of these same layers, both ways in turns."""
    first = layers[0]
    wide = padded(first.module)
    now, then = channels(first.module), channels(wide)
    assert now is not None
    assert then is not None
    stopwatch = Stopwatch(device)
    timers = {
        name: _timer(stopwatch, module, _shape(first, module), first, precision, device)
        for name, module in (("now", copy.deepcopy(first.module)), ("padded", wide))
    }
    for timer in timers.values():
        timer()
    deadline = time.perf_counter() + seconds
    rounds = []
    for times in clock.interleaved(timers, _PAIRS):
        rounds.append(times)
        if len(rounds) >= _FEWEST and time.perf_counter() >= deadline:
            break
    rounds = _least_disturbed(rounds)
    low, high = clock.median_interval([times["now"] / times["padded"] for times in rounds])
    median = {name: statistics.median(times[name] for times in rounds) for name in timers}
    names = tuple(layer.name for layer in layers)
    kind = type(first.module).__name__
    return Misaligned(names, _arrow(now), _arrow(then), share, median["now"], median["padded"], low, high, kind)


def _least_disturbed(rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    """The half of the rounds that was quickest as a whole: which of the two was quicker in them plays no part."""
    return sorted(rounds, key=lambda times: sum(times.values()))[: max(_FEWEST // 2, len(rounds) // 2)]


def _shape(layer: Layer, module: nn.Module) -> tuple[int, ...]:
    """What came into the layer, with as many channels as the module takes."""
    pair = channels(module)
    assert pair is not None
    if isinstance(module, nn.Linear):
        return (*layer.shape[:-1], pair[0])
    spatial: Any = module
    where = len(layer.shape) - len(spatial.kernel_size) - 1
    return (*layer.shape[:where], pair[0], *layer.shape[where + 1 :])


def _timer(
    stopwatch: Stopwatch,
    module: nn.Module,
    shape: tuple[int, ...],
    layer: Layer,
    precision: Precision,
    device: torch.device,
) -> Callable[[], float]:
    given = torch.randn(shape, device=device).to(layer.dtype)
    if layer.layout is not torch.contiguous_format:
        given = given.to(memory_format=layer.layout)
    given.requires_grad_(layer.needs_gradient)

    def step() -> None:
        with precision.scope(device):
            with precision.autocast(device):
                out = module(given)
            if out.requires_grad:
                out.backward(torch.ones_like(out))

    if device.type == "cpu" and torch.get_num_threads() == 1:
        return lambda: _own_seconds(step)
    return lambda: stopwatch.seconds(step)


def _own_seconds(step: Callable[[], None]) -> float:
    """Of this thread, where it does all the work: what others on the machine take is not counted."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def _arrow(pair: tuple[int, int]) -> str:
    return f"{pair[0]}->{pair[1]}"
