"""Measure where the time of a step goes, with torch's profiler: by operation, format and purpose."""

from __future__ import annotations

import copy
import re
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn.modules.conv import _ConvNd
from torch.profiler import ProfilerActivity, profile

import halfstep.measure.candidate  # noqa: F401 (it tells the profiler not to greet, before its first use)
from halfstep import clock
from halfstep.measure.profile.facts import (
    COPIES,
    HOST,
    NARROW,
    OTHER,
    UPDATE,
    WIDE,
    FlopsByFormat,
    KernelTimes,
    MisalignedLayer,
)
from halfstep.measure.timing import Stopwatch
from halfstep.observe.flops import count_flops, name_operation_format
from halfstep.observe.recorder import Operation, Recorder, run_eagerly
from halfstep.precision.island import find_islands
from halfstep.precision.precision import Precision
from halfstep.user_code import HALFSTEP, TORCH, find_running_line

TINY = 20_000
"""Nanoseconds. A CPU operation that takes less is counted as dispatch: its cost is not arithmetic."""
_MATRIX = re.compile(
    r"(?:_?(?:int_|scaled_|grouped_|foreach_)*(?:b?add)?b?mm(?:_v2|_activation)?|(?:add)?mv|v?dot|matmul)_?"
    r"|(?:_|mkldnn_|mkl_)?linear(?:_backward\w*|_pointwise)?"
    r"|\w*conv(?:olution|_transpose|_depthwise|_tbc|[123]d)\w*"
    r"|\w*attention\w*"
    r"|lstm|gru|rnn_tanh|rnn_relu|_lstm_mps|(?:mkldnn|miopen|_cudnn)_rnn(?:_layer)?(?:_backward)?"
)
"""Full names of operations, because some interpolations are called linear and conversions start with "conv"."""
_CONVOLUTION = re.compile(r"conv(?!ert)")
_COPY = re.compile(r"^(copy_|_to_copy|to|contiguous|clone|_copy_from\w*|_reshape_copy|mkldnn_reorder\w*)$")
# Events of autograd's engine enclose operations, and are none themselves.
_OPERATION = re.compile(r"^(?!autograd::|torch::)\w+::(\w+)")
_FORMATS = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}
_SHOWN = 5


class ProfilerEvent(NamedTuple):
    """One event of the profiler. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 0
    dtypes: tuple[str, ...] = ()
    number: int = 0
    """Correlation id to which device events refer."""
    asked_by: int = 0
    """For work on an accelerator: the id of the operation that launched it."""
    on_device: bool = False


def measure_step_kernels(step: Callable[[], object], device: torch.device, steps: int = 5) -> KernelTimes:
    """Return the parts of warmed-up steps. Compiled code runs eagerly, because compiled CPU kernels have no names."""
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(ProfilerActivity.XPU if device.type == "xpu" else ProfilerActivity.CUDA)
    starts: list[int] = []
    with run_eagerly():
        with profile(activities=activities, record_shapes=True) as recorded, LineSampler() as sampled:
            for _ in range(steps):
                with torch.profiler.record_function(_STEP):
                    starts.append(time.perf_counter_ns())
                    step()
                    if device.type != "cpu":
                        torch.accelerator.synchronize(device)
        events = list(map(_convert_profiler_event, recorded.profiler.kineto_results.events()))
    recorded_starts = sorted(event.start for event in events if event.name == _STEP and not event.on_device)
    # The profiler has its own clock.
    shift = recorded_starts[0] - starts[0] if recorded_starts else 0
    return sum_profiler_events(events, [(at + shift, line) for at, line in sampled.lines])


_STEP = "halfstep: a step"


def sum_profiler_events(events: Iterable[ProfilerEvent], lines: Sequence[tuple[int, str | None]] = ()) -> KernelTimes:
    """Return shares of the time of the fastest step, which was disturbed least.

    Device time counts if there is any, otherwise the time of operations. `lines` are running lines of the user's code,
    with the time when they were seen.
    """
    seen = list(events)
    steps = [event for event in seen if event.name == _STEP and not event.on_device]
    fastest = min(steps, key=lambda event: event.end - event.start, default=ProfilerEvent(_STEP, 0, 0))
    wall = fastest.end - fastest.start
    seen = [event for event in seen if fastest.start <= event.start < fastest.end]
    placed = _compute_self_times([event for event in seen if not event.on_device])
    device = [event for event in seen if event.on_device and event.asked_by in placed]
    if device:
        spent = [(placed[event.asked_by][:2], event.end - event.start) for event in device]
    else:
        spent = [((event, updating), own) for event, updating, own in placed.values() if own >= TINY]
    parts: Counter[str] = Counter({NARROW: 0, WIDE: 0, COPIES: 0, UPDATE: 0, OTHER: 0})
    by_name: Counter[str] = Counter()
    other: Counter[str] = Counter()
    convolutions = 0
    for (event, updating), own in spent:
        operation = _OPERATION.match(event.name)
        if operation is None:
            continue
        part = UPDATE if updating else _classify_operation(operation[1], event.dtypes)
        parts[part] += own
        by_name[f"{operation[1]} [{_find_operand_format(event.dtypes)}]"] += own
        other[operation[1]] += own if part == OTHER else 0
        convolutions += own if part == NARROW and _CONVOLUTION.search(operation[1]) else 0
    # Work on several streams or threads can add up to more than the wall time.
    whole = max(wall, sum(parts.values()), 1)
    shares = {HOST: max(0.0, 1 - sum(parts.values()) / whole), **{name: own / whole for name, own in parts.items()}}
    top, most_other, code = (
        {name: own / whole for name, own in counted.most_common(_SHOWN) if own}
        for counted in (by_name, other, _sum_gaps_by_line(seen, fastest, lines))
    )
    return KernelTimes(shares, convolutions / whole, top, most_other, code)


_LONG_GAP = 1_000_000
"""Nanoseconds between two operations: dispatch takes a fiftieth of it."""
_EVERY = 0.001
_LATE = 2_000_000
"""Nanoseconds by which a line is seen late: a call in C lets no other thread run until it returns."""


class LineSampler:
    """Notes every millisecond which line of the user's code runs in the thread that opened it."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str | None]] = []
        """When, and `file:line`; None if no code of the user runs."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True)

    def _look(self, watched: int) -> None:
        while not self._over.wait(_EVERY):
            frame = sys._current_frames().get(watched)
            while frame is not None and frame.f_code.co_filename.startswith(TORCH):
                frame = frame.f_back
            # Where halfstep itself waits for the device, the program that called it is not the cause.
            theirs = frame is not None and not frame.f_code.co_filename.startswith(HALFSTEP)
            self.lines.append((time.perf_counter_ns(), find_running_line(frame) if theirs else None))

    def __enter__(self) -> LineSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _sum_gaps_by_line(
    events: list[ProfilerEvent], step: ProfilerEvent, lines: Sequence[tuple[int, str | None]]
) -> Counter[str]:
    """Return the nanoseconds of long gaps between the operations of a step, by the line that ran in each."""
    found: Counter[str] = Counter()
    end = step.start
    # While an accelerator computes, the host's time costs nothing.
    operations = sorted((e.start, e.end) for e in events if e.on_device or "::" in e.name)
    for start, ends in (*operations, (step.end, step.end)):
        if start - end >= _LONG_GAP:
            seen = Counter(line for at, line in lines if end <= at <= start + _LATE and line is not None)
            if seen:
                found[seen.most_common(1)[0][0]] += start - end
        end = max(end, ends)
    return found


def _classify_operation(operation: str, dtypes: tuple[str, ...]) -> str:
    if _COPY.match(operation):
        return COPIES
    if not _MATRIX.fullmatch(operation):
        return OTHER
    return NARROW if _find_operand_format(dtypes) in ("bf16", "fp16") else WIDE


def _find_operand_format(dtypes: tuple[str, ...]) -> str:
    """Return the format of the second floating argument, an operand of every product; the first may be a bias."""
    floating = [_FORMATS[name] for name in dtypes if name in _FORMATS]
    return floating[min(1, len(floating) - 1)] if floating else "-"


def _compute_self_times(events: list[ProfilerEvent]) -> dict[int, tuple[ProfilerEvent, bool, int]]:
    """Return by id: each event, whether it ran in an optimizer's update, and its self time."""
    threads: dict[int, list[ProfilerEvent]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    found: dict[int, tuple[ProfilerEvent, bool, int]] = {}
    for thread in threads.values():
        open_now: list[tuple[ProfilerEvent, bool]] = []
        # Outer events first: with equal starts, the longer one encloses the other.
        for event in sorted(thread, key=lambda event: (event.start, -event.end)):
            while open_now and open_now[-1][0].end <= event.start:
                open_now.pop()
            # torch records each optimizer's step as a range with this name.
            updating = event.name.startswith("Optimizer.step") or bool(open_now and open_now[-1][1])
            own = event.end - event.start
            if open_now:
                outer, outer_updating = open_now[-1]
                found[outer.number] = outer, outer_updating, found[outer.number][2] - own
            found[event.number] = event, updating, own
            open_now.append((event, updating))
    return found


def _convert_profiler_event(event: Any) -> ProfilerEvent:
    on_device = event.device_type() != DeviceType.CPU
    start, name = event.start_ns(), event.name()
    return ProfilerEvent(
        name=name,
        start=start,
        end=start + event.duration_ns(),
        thread=event.start_thread_id(),
        dtypes=tuple(event.dtypes()),
        number=0 if on_device else event.correlation_id(),
        asked_by=event.linked_correlation_id() if on_device else 0,
        on_device=on_device,
    )


ALIGNED = 8
_WIDE = ("fp32", "fp64", "tf32")


@dataclass(frozen=True)
class RecordedLayer:
    """A layer that ran, and the tensor passed to it."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format
    needs_gradient: bool = True
    """Whether the input requires a gradient; that of a model's first layer does not."""


@dataclass(frozen=True)
class StepLayers:
    """The work of one step, its layers with channels, and the FLOPs by module."""

    work: FlopsByFormat
    layers: tuple[RecordedLayer, ...]
    flops: dict[str, int]
    wide: frozenset[str] = frozenset()
    """Modules that did work in fp32."""


def record_step_layers(model: nn.Module, step: Callable[[], object]) -> StepLayers:
    """Record one step. Compiled code runs eagerly meanwhile; its compiled form is kept."""
    by_format: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    wide_modules: set[str] = set()
    declared = tuple(find_islands(model))

    def listen(operation: Operation) -> None:
        work = count_flops(operation)
        # An operation that torch widens itself, for lack of a kernel, is not the module's fp32.
        if not work or (operation.widened and name_operation_format(operation) == "fp32"):
            return
        found = name_operation_format(operation)
        by_format[found] += work
        by_module[operation.module] += work
        if found in _WIDE:
            module = operation.module
            around = (path for path in declared if path and (module == path or module.startswith(f"{path}.")))
            wide[next(around, module or "(the model itself)")] += work
            wide_modules.add(operation.module)

    layers: dict[str, RecordedLayer] = {}
    with ExitStack() as watching:
        watching.enter_context(run_eagerly())
        for name, module in model.named_modules():
            if find_layer_channels(module):
                handle = module.register_forward_hook(_create_layer_hook(layers, name.replace("_orig_mod.", "")))
                watching.callback(handle.remove)
        watching.enter_context(Recorder(model, listen))
        step()
    work = FlopsByFormat(dict(by_format), dict(wide.most_common()), declared)
    return StepLayers(work, tuple(layers.values()), dict(by_module), frozenset(wide_modules))


def find_layer_channels(module: nn.Module) -> tuple[int, int] | None:
    """Return the in and out channels of a layer that is one matrix product over both; else None, as for groups."""
    if not isinstance(module, (nn.Linear, _ConvNd)):
        return None  # before anything is read from its class, where torch.jit has attributes that raise
    if "forward" in vars(module) or not type(module).forward.__module__.startswith("torch.nn."):
        return None  # a custom forward may compute anything
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.in_channels, module.out_channels) if module.groups == 1 else None


def group_misaligned_layers(
    looked: StepLayers, least: float = 0.05, *, without: Collection[str] = ()
) -> list[tuple[list[RecordedLayer], float]]:
    """Return groups of identical misaligned layers with their share of FLOPs, largest first."""
    total = sum(looked.flops.values())
    groups: dict[Any, list[RecordedLayer]] = defaultdict(list)
    for layer in looked.layers:
        pair = find_layer_channels(layer.module)
        if pair and layer.name not in without and any(count % ALIGNED for count in pair):
            groups[_build_layer_key(layer)].append(layer)
    shares = [
        (group, sum(looked.flops.get(layer.name, 0) for layer in group) / max(total, 1)) for group in groups.values()
    ]
    return sorted([(group, share) for group, share in shares if share >= least], key=lambda pair: -pair[1])


def _build_layer_key(layer: RecordedLayer) -> tuple[Any, ...]:
    module: Any = layer.module
    geometry = tuple(str(getattr(module, name, "")) for name in ("kernel_size", "stride", "padding", "dilation"))
    return (
        type(module).__name__,
        find_layer_channels(module),
        geometry,
        (layer.shape, layer.dtype, layer.layout),
        (layer.needs_gradient, *(parameter.requires_grad for parameter in layer.module.parameters())),
    )


def _create_layer_hook(layers: dict[str, RecordedLayer], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, inputs: Any, _output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            given = inputs[0]
            layers[name] = RecordedLayer(
                name, module, tuple(given.shape), given.dtype, find_memory_format(given), given.requires_grad
            )

    return note


def find_memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: channels_last, channels_last_3d or contiguous."""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return layout
    return torch.contiguous_format


_PAIRS, _FEWEST = 100, 16


def align_channel_count(count: int) -> int:
    """Return the next multiple of 8."""
    return -(-count // ALIGNED) * ALIGNED


def build_padded_layer(module: Any) -> nn.Module:
    """Return a layer of the same kind with random weights and channels that are multiples of 8."""
    before = find_layer_channels(module)
    assert before is not None, "only layers with channels are padded"
    inward, outward = map(align_channel_count, before)
    bias, place = module.bias is not None, {"device": module.weight.device, "dtype": module.weight.dtype}
    if isinstance(module, nn.Linear):
        return _freeze_like(module, nn.Linear(inward, outward, bias, **place))
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    more = {name: getattr(module, name) for name in names}
    if module.transposed:
        more["output_padding"] = module.output_padding
    # A subclass may have another constructor; its torch base class is built instead.
    kind = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn"))
    made: Any = kind(inward, outward, bias=bias, **more, **place)
    layout = find_memory_format(module.weight)
    return _freeze_like(module, made if layout is torch.contiguous_format else made.to(memory_format=layout))


def _freeze_like(module: nn.Module, made: nn.Module) -> nn.Module:
    """Freeze the same weights: a frozen one costs no gradient."""
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(getattr(module, name).requires_grad)
    return made


def measure_misaligned_layer(
    layers: list[RecordedLayer], share: float, precision: Precision, device: torch.device, seconds: float
) -> MisalignedLayer:
    """Time forward and backward of one of these identical layers, as it is and padded, in turns."""
    first = layers[0]
    wide = build_padded_layer(first.module)
    now, then = find_layer_channels(first.module), find_layer_channels(wide)
    assert now is not None
    assert then is not None
    stopwatch = Stopwatch(device)
    timers = {
        name: _create_layer_timer(stopwatch, module, _compute_input_shape(first, module), first, precision, device)
        for name, module in (("now", copy.deepcopy(first.module)), ("padded", wide))
    }
    for timer in timers.values():
        timer()
    deadline = time.perf_counter() + seconds
    rounds = []
    for times in clock.iterate_interleaved_times(timers, _PAIRS):
        rounds.append(times)
        if len(rounds) >= _FEWEST and time.perf_counter() >= deadline:
            break
    # The fastest half by their total, so that the selection favors neither of the two.
    rounds = sorted(rounds, key=lambda times: sum(times.values()))[: max(_FEWEST // 2, len(rounds) // 2)]
    low, high = clock.compute_median_interval([times["now"] / times["padded"] for times in rounds])
    median = {name: statistics.median(times[name] for times in rounds) for name in timers}
    names = tuple(layer.name for layer in layers)
    kind = type(first.module).__name__
    return MisalignedLayer(
        names,
        _format_channel_pair(now),
        _format_channel_pair(then),
        share,
        median["now"],
        median["padded"],
        low,
        high,
        kind,
    )


def _compute_input_shape(layer: RecordedLayer, module: nn.Module) -> tuple[int, ...]:
    """Return the shape of the layer's input, with the module's number of channels."""
    pair = find_layer_channels(module)
    assert pair is not None
    if isinstance(module, nn.Linear):
        return (*layer.shape[:-1], pair[0])
    spatial: Any = module
    where = len(layer.shape) - len(spatial.kernel_size) - 1
    return (*layer.shape[:where], pair[0], *layer.shape[where + 1 :])


def _create_layer_timer(
    stopwatch: Stopwatch,
    module: nn.Module,
    shape: tuple[int, ...],
    layer: RecordedLayer,
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

    # One thread does all the work there, so its own CPU time excludes other load on the machine.
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return lambda: _measure_thread_seconds(step)
    return lambda: stopwatch.seconds(step)


def _measure_thread_seconds(step: Callable[[], None]) -> float:
    """Return the CPU seconds of this thread."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def _format_channel_pair(pair: tuple[int, int]) -> str:
    return f"{pair[0]}->{pair[1]}"
