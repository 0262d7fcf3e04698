"""The base class of meters: a meter observes a sampled step at three moments, and reports later."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.finding import Finding
from halfstep.observe.recorder import has_compiled_code
from halfstep.precision.island import find_islands
from halfstep.step.census import list_optimizer_parameters
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.report import StepReport
from halfstep.step.stepper import Stepper

# Move numbers from the device to the host without waiting. Meters write into one tensor on the device; it is copied
# while training continues, and read one step later, when the step's own synchronization has completed everything before
# it.


PLACES = 256


class AsyncScalars:
    """A row of numbers, all zero after `wipe`; counts up to 2**24 are exact, since they are fp32."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        queued = device.type in ("cuda", "xpu")
        self._row = torch.zeros(PLACES, device=device)
        self._places = self._row.unbind()
        self._host = torch.zeros(PLACES, pin_memory=queued)
        # Read through ctypes: Tensor.item() could wait for the device, and would count as a synchronization.
        self._memory = (ctypes.c_float * PLACES).from_address(self._host.data_ptr())
        self._kind: Any = torch.get_device_module(device)
        self._sent: Any = self._kind.Event() if queued else None
        self._used = 0

    def wipe(self) -> None:
        """Set all numbers to zero and release all places."""
        self._row.zero_()
        self._used = 0

    def reserve_slot(self) -> tuple[int, Tensor]:
        """Reserve the next free place; return its index, and the number there as a tensor to write into."""
        if self._used == PLACES:
            raise IndexError(f"more than {PLACES} numbers in one sample")
        self._used += 1
        return self._used - 1, self._places[self._used - 1]

    def note(self, number: Tensor) -> int:
        """Write a number that is on the device, and return its place."""
        index, place = self.reserve_slot()
        place.copy_(number)
        return index

    def send(self) -> None:
        """Start the copy to the host.

        Apple's GPUs cannot copy asynchronously, so a sampled step waits once more there.
        """
        self._host.copy_(self._row, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(self._kind.current_stream(self.device))

    @property
    def arrived(self) -> bool:
        """Return whether the copy has arrived, without waiting."""
        return self._sent is None or bool(self._sent.query())

    def read(self) -> list[float]:
        """Return the numbers that were written; only valid after `arrived`."""
        return list(self._memory[: self._used])


FORMS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""The containers whose output is that of a module inside them."""
TABLES = (nn.Embedding, nn.EmbeddingBag)
"""The modules whose gradients are sums, not products, and zero for a word that is not in the batch."""


class MeteredMembers:
    """The metered modules and weights of a stepper's model."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._known: Any = None
        self._modules: list[nn.Module] = []

    def look(self) -> None:
        """Update the lists if the model has changed; compares identities only, and touches no tensor."""
        if self._known is None or self._stepper.model_changed or self._known != self._kinds():
            self._look_anew()

    def _look_anew(self) -> None:
        model = self._stepper.model
        self._modules = list(model.modules())
        self._known = self._kinds()
        self.compiled = has_compiled_code(model)
        self.metered = list_metered_modules(model)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.not_multiplied = collect_wide_weight_ids(model)

    def _kinds(self) -> Any:
        """Return what changes if a module becomes an island (its class) or is compiled (its call or its forward)."""
        own = [vars(module) for module in self._modules]
        compiled = [(slots.get("_compiled_call_impl"), slots.get("forward")) for slots in own]
        return self._stepper.model_version, list(map(type, self._modules)), compiled


def list_metered_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with weights of their own, and blocks of them, whose residual sums no other module shows.

    The model's own output is left out, since a loss may take it in fp32; so is everything inside an island.
    """
    inside = tuple(f"{path}." if path else "" for path in find_islands(model))
    found = [
        (path, module)
        for path, module in model.named_modules()
        if path
        and not (inside and path.startswith(inside))
        and not isinstance(module, FORMS)
        and (module._parameters or module._modules)
    ]
    return found or [("", model)]


def collect_wide_weight_ids(model: nn.Module) -> set[int]:
    """Return the weights whose gradients are not computed in the run's format: those of islands and embeddings."""
    wide = [*find_islands(model).values(), *(module for module in model.modules() if isinstance(module, TABLES))]
    return {id(parameter) for module in wide for parameter in module.parameters()}


ELEMENTS = 2**20
"""The maximum number of elements of a tensor that are inspected; of a larger one, the first rows."""

T = TypeVar("T")


class TrainedParameter(NamedTuple):
    """A parameter that this step may update."""

    name: str
    parameter: Tensor
    slot: OptimizerSlot


class SampledStep:
    """A sampled step: its number, its stepper, and the scalars for its numbers."""

    def __init__(
        self, stepper: Stepper, scalars: AsyncScalars, members: MeteredMembers, turn: int, *, hooks: bool
    ) -> None:
        self.stepper, self.scalars, self.members = stepper, scalars, members
        self.hooks = hooks
        """Whether the model runs only inside the step, so that hooks see nothing else."""
        self.turn = turn
        """The number of samples before this one."""
        self.in_hooks = 0.0
        """The host time that hooks took out of the forward pass, in seconds."""
        self.report: StepReport | None = None
        """The report; known as soon as the gradients are."""

    @cached_property
    def trained(self) -> list[TrainedParameter]:
        """Return the trainable parameters of the optimizers that this step is for."""
        assert self.report is not None, "which optimizers a step is for is known with its report"
        names = self.members.names
        return [
            TrainedParameter(names.get(id(p), "a parameter outside the model"), p, slot)
            for slot in self.stepper.slots.values()
            if slot.name in self.report.parts
            for p in list_optimizer_parameters(slot.optimizer)
            if p.requires_grad
        ]

    @cached_property
    def with_gradients(self) -> list[TrainedParameter]:
        """Return those with a dense gradient of which this rank holds a part; only valid before the update."""
        return [
            one
            for one in self.trained
            if _is_dense_gradient(one.parameter.grad) and view_local_part(one.parameter).numel()
        ]


def view_local_part(tensor: Tensor) -> Tensor:
    """Return a view of this rank's part of a tensor, cut to the first rows if it is large."""
    local = distributed.unwrap_local_tensor(tensor.detach())
    if local.numel() <= ELEMENTS:
        return local
    return local[: max(1, ELEMENTS // (local.numel() // len(local)))]


def select_next_turn(all_of_them: Sequence[T], turn: int, at_once: int) -> list[T]:
    """Return some of many, different ones for each turn, until all have been chosen."""
    if len(all_of_them) <= at_once:
        return list(all_of_them)
    first = turn * at_once % len(all_of_them)
    return [*all_of_them[first:], *all_of_them[:first]][:at_once]


def _is_dense_gradient(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.is_sparse


Reading = float | int | str


class Monitor(ABC):
    """A meter; it writes tensors to the sample's scalars, and never reads a number from a tensor."""

    # Reading would synchronize the host with the device in the middle of a step.

    turn: int | None = None
    """0 or 1 for a meter that observes every other sample."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}
        """The latest numbers, for the journal."""

    def before(self, sample: SampledStep) -> None:
        """Prepare before the step."""
        return

    def gradients(self, sample: SampledStep) -> None:
        """Observe the gradients, unscaled and clipped, before the update; not called for a skipped step."""
        return

    def after(self, sample: SampledStep) -> None:
        """Observe the step after it was applied or skipped."""
        return

    def drop(self) -> None:
        """Clean up after a step that raised an error, or when the meters end."""
        return

    @abstractmethod
    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return findings, one step later, when the scalars's numbers are on the host."""


class Crossings:
    """The names that are over a threshold now, so that each crossing is reported once."""

    def __init__(self) -> None:
        self._over: set[str] = set()

    def new(self, looked_at: Collection[str], over: Collection[str]) -> list[str]:
        """Return the names that were not over the threshold when they were last observed."""
        fresh = [name for name in over if name not in self._over]
        self._over = (self._over - set(looked_at)) | set(over)
        return fresh


def format_and_more(count: int) -> str:
    """Return the end of a sentence for further names."""
    return f", and {count} more" if count > 0 else ""
