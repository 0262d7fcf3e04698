"""How far each module's output is from overflow, in factors of two, and when it will be there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep import world
from halfstep.finding import Finding
from halfstep.formats import Format
from halfstep.guard.meters.forecast import steps_left
from halfstep.guard.meters.meter import Crossings, Meter, and_more
from halfstep.guard.meters.sample import Sample, taking_turns

AT_ONCE = 64
"""Modules in one sample; where there are more, they take turns."""
KEPT = 16
"""Samples of a module that a forecast is made from."""
LITTLE = 1.0
"""Bits: the next doubling overflows."""


class Headroom(Meter):
    """The largest output of each module, against the largest number of the format that the run computes in."""

    def __init__(self) -> None:
        super().__init__()
        self._looks: list[tuple[Look, RemovableHandle]] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, deque[tuple[int, float]]] = {}
        self._little, self._rising = Crossings(), Crossings()

    def before(self, sample: Sample) -> None:
        self._places = {}
        hidden = why_hidden(sample)
        if hidden:
            self.readings = {"headroom": f"not metered: {hidden}"}
            return
        format = sample.stepper.precision.computes
        for path, module in taking_turns(sample.members.metered, sample.turn, AT_ONCE):
            high, highest = sample.slate.place()
            low, lowest = sample.slate.place()
            self._places[path] = high, low
            look = Look(module, format, highest, lowest)
            self._looks.append((look, module.register_forward_hook(look)))

    def after(self, sample: Sample) -> None:
        sample.in_hooks = sum(look.seconds for look, _ in self._looks)
        failed = next((look.failed for look, _ in self._looks if look.failed is not None), None)
        self.drop()
        if failed is not None:
            raise failed

    def drop(self) -> None:
        for _, handle in self._looks:
            handle.remove()
        self._looks = []

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        report = sample.report
        largest = {path: max(numbers[high], -numbers[low]) for path, (high, low) in self._places.items()}
        # A module that did not run left zeros; what is not finite is the business of the step's own check.
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
        found = {path: steps_left(self._seen[path], limit) for path in paths}
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
                f"{bits[path]:.1f} bits are left{and_more(len(fresh) - 1)}",
                cure(path),
            )

    def _say_when(self, largest: dict[str, float], left: dict[str, float], format: Format) -> Iterator[Finding]:
        fresh = self._rising.new(largest, sorted(left, key=left.__getitem__))
        if fresh:
            path = fresh[0]
            yield Finding(
                "headroom-shrinks",
                "warning",
                f"{path}: its largest output is {largest[path]:,.4g} and grows steadily; it reaches {format.name}'s "
                f"limit in about {round(left[path], -1):,.0f} steps{and_more(len(fresh) - 1)}",
                cure(path),
            )


def cure(path: str) -> str:
    return f'halfstep.island(model, "{path}"), precision=bf16, or a lower learning rate'


def why_hidden(sample: Sample) -> str | None:
    """Why there can be no hooks in this step: Dynamo, for one, compiles again when they come or go."""
    if not sample.hooks:
        return "the loop calls the stepper itself, so that the model may run between the steps; guardian.step meters it"
    attempt = sample.stepper.attempt  # the step before
    loss_compiled = attempt is not None and hasattr(attempt.loss_fn, "_torchdynamo_orig_callable")
    what = "the model" if sample.members.compiled else "the loss function" if loss_compiled else None
    return what and f"{what} is compiled, and hooks would compile it anew"


class Look:
    """A forward hook that keeps the extremes of what one module puts out. A copy of the module has none."""

    def __init__(self, module: nn.Module, format: Format, highest: Tensor, lowest: Tensor) -> None:
        self._module, self._highest, self._lowest = module, highest, lowest
        self._dtype = format.dtype or torch.float32
        """What is put out in a wider format has that one's room."""
        self.seconds = 0.0
        """Of the host's, spent here."""
        self.failed: Exception | None = None
        """A meter must not end the forward pass that it looks at."""

    def __call__(self, module: nn.Module, given: Any, output: Any) -> None:
        if module is not self._module or self.failed is not None:
            return
        began = perf_counter()
        try:
            for tensor in _floats(output):
                if tensor.device == self._highest.device and tensor.dtype is self._dtype:
                    # Makes no copy of an activation, and autocast does not touch it.
                    lowest, highest = torch.aminmax(tensor)
                    torch.maximum(self._highest, highest, out=self._highest)
                    torch.minimum(self._lowest, lowest, out=self._lowest)
        except Exception as error:
            self.failed = error
        self.seconds += perf_counter() - began

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return look_at_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return (_without_a_hook, ())


def look_at_nothing(module: nn.Module, given: Any, output: Any) -> None:
    """In place of a hook, in a copy of a module."""


def _without_a_hook() -> Callable[..., None]:
    return look_at_nothing


def _floats(output: Any) -> Iterator[Tensor]:
    """The plain floating tensors of an output; a subclass may do anything with an operation on it."""
    if isinstance(output, (list, tuple)):
        for item in output:
            yield from _floats(item)
    elif isinstance(output, dict):
        yield from _floats(list(output.values()))
    elif isinstance(output, Tensor):
        whole: Any = output.detach()
        local: Tensor = whole.to_local() if world.is_shard(whole) else whole
        plain = type(local) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(local)
        if plain and local.is_floating_point() and local.layout is torch.strided and local.numel():
            yield local
