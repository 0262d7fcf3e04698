"""Measure how far each module's output is from overflow, in factors of two, and forecast when it overflows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep import distributed
from halfstep.finding import Finding
from halfstep.formats import Format
from halfstep.guard.monitors.base import Crossings, Monitor, SampledStep, format_and_more, select_next_turn
from halfstep.guard.monitors.trends import predict_steps_left

AT_ONCE = 64
"""The number of modules in one sample; more of them take turns."""
KEPT = 16
"""The number of samples of a module that a forecast uses."""
LITTLE = 1.0
"""The headroom in bits below which it is reported: the next doubling overflows."""


class Headroom(Monitor):
    """The meter of each module's largest output, relative to the largest number of the run's format."""

    def __init__(self) -> None:
        super().__init__()
        self._looks: list[tuple[ExtremaHook, RemovableHandle]] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, deque[tuple[int, float]]] = {}
        self._little, self._rising = Crossings(), Crossings()

    def before(self, sample: SampledStep) -> None:
        """Register hooks on some modules, in turn."""
        self._places = {}
        hidden = explain_hidden_hooks(sample)
        if hidden:
            self.readings = {"headroom": f"not metered: {hidden}"}
            return
        format = sample.stepper.precision.computes
        for path, module in select_next_turn(sample.members.metered, sample.turn, AT_ONCE):
            high, highest = sample.scalars.reserve_slot()
            low, lowest = sample.scalars.reserve_slot()
            self._places[path] = high, low
            look = ExtremaHook(module, format, highest, lowest)
            self._looks.append((look, module.register_forward_hook(look)))

    def after(self, sample: SampledStep) -> None:
        """Remove the hooks, and raise the error of one that failed."""
        sample.in_hooks = sum(look.seconds for look, _ in self._looks)
        failed = next((look.failed for look, _ in self._looks if look.failed is not None), None)
        self.drop()
        if failed is not None:
            raise failed

    def drop(self) -> None:
        """Remove the hooks."""
        for _, handle in self._looks:
            handle.remove()
        self._looks = []

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return findings for modules with little headroom, and for those whose headroom shrinks."""
        report = sample.report
        largest = {path: max(numbers[high], -numbers[low]) for path, (high, low) in self._places.items()}
        # A module that did not run left zeros; non-finite values are reported by the step's own check.
        largest = {path: value for path, value in largest.items() if 0.0 < value < math.inf}
        if report is None or not largest:
            return []
        format = sample.stepper.precision.computes
        for path, value in largest.items():
            self._seen.setdefault(path, deque(maxlen=KEPT)).append((report.step, math.log2(value)))
        bits = {path: math.log2(format.largest / value) for path, value in largest.items()}
        left = self._forecasts(largest, format)
        self._note(bits, left)
        return [*self._say_little(largest, bits, format), *self._say_when(largest, left, format)]

    def _forecasts(self, paths: dict[str, float], format: Format) -> dict[str, float]:
        limit = math.log2(format.largest)
        found = {path: predict_steps_left(self._seen[path], limit) for path in paths}
        return {path: steps for path, steps in found.items() if steps is not None}

    def _note(self, bits: dict[str, float], left: dict[str, float]) -> None:
        tightest = min(bits, key=bits.__getitem__)
        self.readings = {"headroom_bits": bits[tightest], "headroom_module": tightest}
        if left:
            self.readings["overflow_in_steps"] = min(left.values())

    def _say_little(self, largest: dict[str, float], bits: dict[str, float], format: Format) -> Iterator[Finding]:
        fresh = self._little.new(bits, [path for path in sorted(bits, key=bits.__getitem__) if bits[path] < LITTLE])
        if fresh:
            path = fresh[0]
            yield Finding(
                "headroom-little",
                "warning",
                f"{path}: its largest output is {largest[path]:,.0f}, and {format.name} ends at {format.largest:,.0f}: "
                f"{bits[path]:.1f} bits are left{format_and_more(len(fresh) - 1)}",
                advise_headroom(path),
            )

    def _say_when(self, largest: dict[str, float], left: dict[str, float], format: Format) -> Iterator[Finding]:
        fresh = self._rising.new(largest, sorted(left, key=left.__getitem__))
        if fresh:
            path = fresh[0]
            yield Finding(
                "headroom-shrinks",
                "warning",
                f"{path}: its largest output is {largest[path]:,.4g} and grows steadily; it reaches {format.name}'s "
                f"limit in about {round(left[path], -1):,.0f} steps{format_and_more(len(fresh) - 1)}",
                advise_headroom(path),
            )


def advise_headroom(path: str) -> str:
    """Return the advice for a module with little headroom."""
    return f'halfstep.island(model, "{path}"), precision=bf16, or a lower learning rate'


def explain_hidden_hooks(sample: SampledStep) -> str | None:
    """Return why hooks cannot be used in this step, or None."""
    # Dynamo, for example, recompiles whenever hooks are added or removed.
    if not sample.hooks:
        return "the loop calls the stepper itself, so the model may run between the steps; guardian.step meters it"
    # The attempt of the previous step: this one has yet to start.
    attempt = sample.stepper.attempt
    loss_compiled = attempt is not None and hasattr(attempt.loss_fn, "_torchdynamo_orig_callable")
    what = "the model" if sample.members.compiled else "the loss function" if loss_compiled else None
    return what and f"{what} is compiled, and hooks would recompile it"


class ExtremaHook:
    """A forward hook that keeps the extremes of one module's output; a copy of the module gets no hook."""

    def __init__(self, module: nn.Module, format: Format, highest: Tensor, lowest: Tensor) -> None:
        self._module, self._highest, self._lowest = module, highest, lowest
        self._dtype = format.dtype or torch.float32
        """The dtype that is metered; an output in a wider format has more headroom."""
        self.seconds = 0.0
        """The host time spent here, in seconds."""
        self.failed: Exception | None = None
        """The first error; a meter must not end the forward pass that it observes."""

    def __call__(self, module: nn.Module, given: Any, output: Any) -> None:
        if module is not self._module or self.failed is not None:
            return
        began = perf_counter()
        try:
            for tensor in _iterate_float_tensors(output):
                if tensor.device == self._highest.device and tensor.dtype is self._dtype:
                    # aminmax makes no copy of an activation, and autocast does not affect it.
                    lowest, highest = torch.aminmax(tensor)
                    torch.maximum(self._highest, highest, out=self._highest)
                    torch.minimum(self._lowest, lowest, out=self._lowest)
        except Exception as error:
            self.failed = error
        self.seconds += perf_counter() - began

    # A deep copy, or a pickle, of a model in the middle of a sampled step must not write into these scalars.
    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return ignore_output

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unhooked_forward, ())


def ignore_output(module: nn.Module, given: Any, output: Any) -> None:
    """Do nothing; this replaces the hook in a copy of a module."""


def _unhooked_forward() -> Callable[..., None]:
    return ignore_output


def _iterate_float_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the plain floating-point tensors of an output; a tensor subclass could do anything with an operation."""
    if isinstance(output, (list, tuple)):
        for item in output:
            yield from _iterate_float_tensors(item)
    elif isinstance(output, dict):
        yield from _iterate_float_tensors(list(output.values()))
    elif isinstance(output, Tensor):
        local = distributed.unwrap_local_tensor(output.detach())
        plain = type(local) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(local)
        if plain and local.is_floating_point() and local.layout is torch.strided and local.numel():
            yield local
