"""The inputs of a step: enough to run it again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.observe.reachable import closure_of, global_names, held_by, leaves, outermost
from halfstep.step.objective import Objective
from halfstep.step.sync import LossFunction

# -- held -------------------------------------------------------------------------------------------------------------
# Find what a loss function holds: other modules, and random number generators of its own.


_CONTAINERS = (dict, list, tuple, set)
_LONGEST = 64
"""Members of a container that are looked at before each step: enough for some networks, too few for a data set."""
_HOLD_NOTHING = (bool, int, float, str, bytes, Tensor, type, ModuleType, type(None))


class Holdings:
    """The modules and generators that a loss function holds; searched again only when it holds something else."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._function: Any = None
        self._near: list[Any] = []
        self.modules: list[nn.Module] = []
        """Modules beside the model; none of them is part of another one here."""
        self._generators: list[torch.Generator] = []

    def look(self, function: Any) -> list[nn.Module]:
        """Return the modules that were added or removed since the last look."""
        near = _near(function)
        # A lambda in the loop is a new function in every step, and holds the same objects.
        same = function is self._function or _same_code(function, self._function)
        self._function = function
        # The full search walks everything reachable, so it runs only if the nearest objects changed.
        if same and len(near) == len(self._near) and all(map(_is, near, self._near)):
            return []
        self._near, before = near, self.modules
        self.modules = outermost(held_by(function, nn.Module), self._model)
        self._generators = held_by(function, torch.Generator)
        return _in_one_only(before, self.modules)

    def generator_states(self) -> list[tuple[torch.Generator, Tensor]]:
        """Return each generator with its current state."""
        return [(generator, generator.get_state()) for generator in self._generators] if self._generators else []


def _is(one: Any, other: Any) -> bool:
    return one is other


def _in_one_only(some: list[nn.Module], others: list[nn.Module]) -> list[nn.Module]:
    known, now = {id(module) for module in some}, {id(module) for module in others}
    return [module for module in (*some, *others) if (id(module) in known) != (id(module) in now)]


def _near(function: Any) -> list[Any]:
    """Return the objects that a function holds itself, and the members of its containers, which may be replaced."""
    found = [thing for thing in _held(function) if not isinstance(thing, _HOLD_NOTHING)]
    for thing in found:
        if isinstance(thing, _CONTAINERS) and len(thing) <= _LONGEST:
            found = [*found, *(thing.values() if isinstance(thing, dict) else thing)]
    return found


def _held(function: Any) -> list[Any]:
    if isinstance(function, FunctionType):
        known = function.__globals__
        found = [known[name] for name in global_names(function.__code__) if name in known]
        return [*found, *closure_of(function).values(), *(function.__defaults__ or ())]
    if isinstance(function, MethodType):
        return [function.__self__, *getattr(function.__self__, "__dict__", {}).values()]
    if isinstance(function, functools.partial):
        return [*_held(function.func), *function.args, *function.keywords.values()]
    return [function, *getattr(function, "__dict__", {}).values()]


def _same_code(a: Any, b: Any) -> bool:
    if isinstance(a, MethodType) and isinstance(b, MethodType):  # Python creates a bound method at each access
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return isinstance(a, FunctionType) and isinstance(b, FunctionType) and a.__code__ is b.__code__


# -- step inputs ------------------------------------------------------------------------------------------------------


class Factor(NamedTuple):
    """The factors of one loss before backward."""

    scale: float
    base: float | None
    """The divisor of sums; None for means, and before the first sum."""


class Reach(NamedTuple):
    """The parameters that one loss leads to."""

    parameters: Sequence[Tensor]
    """The parameters that it trains; gradients of others are ignored."""
    alone: bool
    """Whether backward is unrestricted; with several losses it is restricted to these parameters."""


class StepInputs(NamedTuple):
    """The current step, or the last one. It refers to the batch, which lives until the next step begins."""

    loss_fn: LossFunction | None
    """None in the context form without `rerun`, which cannot be run again."""
    microbatches: Sequence[Any]
    only: str | None
    generators: list[Tensor]
    """torch's generator states before the first micro-batch: the CPU's, then the device's."""
    factors: dict[str, Factor]
    """By loss, for the losses of this step."""
    versions: tuple[int, ...]
    """The version counter of each tensor of the batch before the step."""
    reaches: dict[str, Reach] | None = None
    """By loss; None if unknown, as for a step that was read from disk: then everything that the model trains."""
    own_generators: Sequence[tuple[torch.Generator, Tensor]] = ()
    """The generators that the loss function holds, with their states before the first micro-batch."""

    def has(self, objectives: Sequence[Objective]) -> None:
        """Set the losses of this step."""
        assert self.reaches is not None, "read from disk, and asked about a step that begins"
        for objective in objectives:
            loss = objective.loss
            self.factors[loss.name] = Factor(loss.scale.value, loss.base_count)
            self.reaches[loss.name] = Reach(objective.trainable, objective.everywhere)

    def with_microbatch(self, loss_fn: LossFunction, batch: Any) -> StepInputs:
        """Return the same step with one more micro-batch, in the context form; the newest loss function runs all."""
        versions = self.versions + versions_of((batch,))
        return self._replace(loss_fn=loss_fn, microbatches=[*self.microbatches, batch], versions=versions)

    @property
    def batch_changed(self) -> bool:
        """Whether the batch was written since the step: repeating it would not be the same step."""
        return self.versions != versions_of(self.microbatches)


def versions_of(tree: Sequence[Any]) -> tuple[int, ...]:
    """Return the version counters of a batch's tensors, in order; -1 for inference tensors."""
    found: list[Tensor] = []
    for microbatch in tree:
        # Most batches are a tensor or a flat sequence of them, and need no search.
        if isinstance(microbatch, Tensor):
            found.append(microbatch)
        elif type(microbatch) in (tuple, list) and all(isinstance(item, Tensor) for item in microbatch):
            found += microbatch
        else:
            found += [leaf for _, leaf in leaves(microbatch)]
    return tuple([-1 if tensor.is_inference() else tensor._version for tensor in found])


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, then the device's."""
    if device.type in ("cuda", "xpu"):
        return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)]
    if device.type == "mps":
        return [torch.get_rng_state(), torch.mps.get_rng_state()]
    return [torch.get_rng_state()]


def set_generator_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Restore the states that `generator_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "mps":
        torch.mps.set_rng_state(states[1])
    elif len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
