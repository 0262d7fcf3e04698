"""Where the time of a step goes, from torch's own profiler: by operation, its format, and what it is done for."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import halfstep.measure.allocator  # noqa: F401 (it tells the profiler not to greet, before its first use)
from halfstep.measure.profiling.facts import COPIES, HOST, NARROW, OTHER, UPDATE, WIDE, Kernels

TINY = 20_000
"""Nanoseconds. An operation on a CPU that takes less is all dispatch: the arithmetic in it is not what it costs."""
_MATRIX = re.compile(
    r"(?:_?(?:int_|scaled_|grouped_|foreach_)*(?:b?add)?b?mm(?:_v2|_activation)?|(?:add)?mv|v?dot|matmul)_?"
    r"|(?:_|mkldnn_|mkl_)?linear(?:_backward\w*|_pointwise)?"
    r"|\w*conv(?:olution|_transpose|_depthwise|_tbc|[123]d)\w*"
    r"|\w*attention\w*"
    r"|lstm|gru|rnn_tanh|rnn_relu|_lstm_mps|(?:mkldnn|miopen|_cudnn)_rnn(?:_layer)?(?:_backward)?"
)
"""Names of operations, whole: an interpolation is called linear too, and a conversion begins like a convolution."""
_CONVOLUTION = re.compile(r"conv(?!ert)")
_COPY = re.compile(r"^(copy_|_to_copy|to|contiguous|clone|_copy_from\w*|_reshape_copy|mkldnn_reorder\w*)$")
_OPERATION = re.compile(r"^(?!autograd::|torch::)\w+::(\w+)")
_FORMATS = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}
_SHOWN = 5


class Seen(NamedTuple):
    """One event of the profiler. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 0
    dtypes: tuple[str, ...] = ()
    number: int = 0
    """What events of a device refer to."""
    asked_by: int = 0
    """For work of an accelerator: the number of the operation that asked for it."""
    on_device: bool = False


def kernels_of(step: Callable[[], object], device: torch.device, steps: int = 5) -> Kernels:
    """Of steps that have been warmed up. Compiled code is run as it was written: its kernels bear no names."""
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(ProfilerActivity.XPU if device.type == "xpu" else ProfilerActivity.CUDA)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager:
        with profile(activities=activities, record_shapes=True) as recorded:
            for _ in range(steps):
                with torch.profiler.record_function(_STEP):
                    step()
                    if device.type != "cpu":
                        torch.accelerator.synchronize(device)
        return summed(map(_seen, recorded.profiler.kineto_results.events()))


_STEP = "halfstep: a step"


def summed(events: Iterable[Seen]) -> Kernels:
    """Shares of the fastest step's time, which was disturbed least.

    An accelerator's own time counts where there is any, else that of operations.
    """
    seen = list(events)
    steps = [event for event in seen if event.name == _STEP and not event.on_device]
    fastest = min(steps, key=lambda event: event.end - event.start, default=Seen(_STEP, 0, 0))
    wall = fastest.end - fastest.start
    seen = [event for event in seen if fastest.start <= event.start < fastest.end]
    placed = _placed([event for event in seen if not event.on_device])
    device = [event for event in seen if event.on_device and event.asked_by in placed]
    if device:
        spent = [(placed[event.asked_by][:2], event.end - event.start) for event in device]
    else:
        spent = [((event, updating), own) for event, updating, own in placed.values() if own >= TINY]
    parts: Counter[str] = Counter({NARROW: 0, WIDE: 0, COPIES: 0, UPDATE: 0, OTHER: 0})
    by_name: Counter[str] = Counter()
    convolutions = 0
    for (event, updating), own in spent:
        operation = _OPERATION.match(event.name)
        if operation is None:
            continue
        part = UPDATE if updating else _part(operation[1], event.dtypes)
        parts[part] += own
        by_name[f"{operation[1]} [{_format(event.dtypes)}]"] += own
        convolutions += own if part == NARROW and _CONVOLUTION.search(operation[1]) else 0
    whole = max(wall, sum(parts.values()), 1)
    shares = {HOST: max(0.0, 1 - sum(parts.values()) / whole), **{name: own / whole for name, own in parts.items()}}
    top = {name: own / whole for name, own in by_name.most_common(_SHOWN)}
    return Kernels(shares, convolutions / whole, top)


def _part(operation: str, dtypes: tuple[str, ...]) -> str:
    if _COPY.match(operation):
        return COPIES
    if not _MATRIX.fullmatch(operation):
        return OTHER
    return NARROW if _format(dtypes) in ("bf16", "fp16") else WIDE


def _format(dtypes: tuple[str, ...]) -> str:
    """Of the second floating argument, which is an operand of every product; the first may be a bias."""
    floating = [_FORMATS[name] for name in dtypes if name in _FORMATS]
    return floating[min(1, len(floating) - 1)] if floating else "-"


def _placed(events: list[Seen]) -> dict[int, tuple[Seen, bool, int]]:
    """By number: each event, whether it ran in an optimizer's update, and the time that is its own."""
    threads: dict[int, list[Seen]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    found: dict[int, tuple[Seen, bool, int]] = {}
    for thread in threads.values():
        open_now: list[tuple[Seen, bool]] = []
        for event in sorted(thread, key=lambda event: (event.start, -event.end)):
            while open_now and open_now[-1][0].end <= event.start:
                open_now.pop()
            updating = event.name.startswith("Optimizer.step") or bool(open_now and open_now[-1][1])
            own = event.end - event.start
            if open_now:
                outer, outer_updating = open_now[-1]
                found[outer.number] = outer, outer_updating, found[outer.number][2] - own
            found[event.number] = event, updating, own
            open_now.append((event, updating))
    return found


def _seen(event: Any) -> Seen:
    on_device = event.device_type() != DeviceType.CPU
    start, name = event.start_ns(), event.name()
    return Seen(
        name=name,
        start=start,
        end=start + event.duration_ns(),
        thread=event.start_thread_id(),
        dtypes=tuple(event.dtypes()),
        number=0 if on_device else event.correlation_id(),
        asked_by=event.linked_correlation_id() if on_device else 0,
        on_device=on_device,
    )
