"""The inputs of a step: enough to run it again."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.observe.identities import identify_storage
from halfstep.observe.reachable import (
    collect_closure_variables,
    find_reachable_instances,
    iterate_reachable,
    iterate_tensor_leaves,
    list_global_names,
    select_outermost_modules,
)
from halfstep.random_state import set_torch_rng_states
from halfstep.step.census import VERSION, are_same
from halfstep.step.memory import unwrap_strided_tensors
from halfstep.step.objective import Objective
from halfstep.step.sync import LossFunction

# -- held -------------------------------------------------------------------------------------------------------------
# Find the other modules and the random number generators that a loss function holds.


_CONTAINERS = (dict, list, tuple, set)
_LONGEST = 64
"""Members of a container that are looked at before each step: enough for some networks, too few for a data set."""
_A_TENSOR = object()
"""Stands for a tensor of an earlier window."""
_HOLD_NOTHING = (bool, int, float, str, bytes, type(None))
_LEAD_NOWHERE = frozenset({ModuleType, BuiltinFunctionType, CodeType, type})
"""Exactly these types of objects, whose members are not looked at before each step."""


class LossFunctionHoldings:
    """The modules and generators that a loss function holds; searched again only when it holds something else."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._function: Any = None
        self._near: list[tuple[str, Any]] = []
        self.modules: list[nn.Module] = []
        """Modules other than the model; none of them is part of another one here."""
        self._generators: list[torch.Generator] = []
        self._direct: list[Any] | None = None
        """What the function holds, if none of it leads to other objects."""

    def look(self, function: Any) -> list[nn.Module]:
        """Return the modules that were added or removed since the last look."""
        direct = _list_directly_held(function)
        # Nearly every step: a plain function, also one that the loop defines anew, which holds what it held.
        if direct is not None and self._direct is not None and are_same(direct, self._direct):
            self._function = function
            return []
        self._direct = direct if direct is not None and all(map(_leads_nowhere, direct)) else None
        near, before = list(_iterate_near_objects(function)), self._near
        # A lambda in the loop is a new function in every step, and holds the same objects.
        same = function is self._function or _have_same_code(function, self._function)
        self._function, self._near = function, near
        # The full search walks everything reachable, so it runs only if the nearest objects changed.
        if same and len(near) == len(before) and all(map(_are_same_or_tensors, near, before)):
            return []
        modules, self.modules = (
            self.modules,
            select_outermost_modules(find_reachable_instances(function, nn.Module), self._model),
        )
        self._generators = find_reachable_instances(function, torch.Generator)
        known, now = {id(module) for module in modules}, {id(module) for module in self.modules}
        return [module for module in (*modules, *self.modules) if (id(module) in known) != (id(module) in now)]

    def rebound(self, but_for: Sequence[Any]) -> list[str]:
        """Return the names of tensors next to the loss function that were bound anew since the last look.

        Attributes of the objects in `but_for` are left out.
        """
        before = dict(self._near)
        others = tuple(f"{name}." for name, thing in self._near if any(thing is other for other in but_for))
        return [
            name
            for name, thing in _iterate_near_objects(self._function)
            if isinstance(thing, Tensor) and before.get(name, thing) is not thing and not name.startswith(others)
        ]

    def release(self) -> None:
        """Let go of tensors, after the window: the loop may drop them before the next one."""
        if self._direct is None:
            self._near = [(name, _A_TENSOR if isinstance(thing, Tensor) else thing) for name, thing in self._near]

    def generator_states(self) -> list[tuple[torch.Generator, Tensor]]:
        """Return each generator with its current state."""
        return [(generator, generator.get_state()) for generator in self._generators] if self._generators else []


def _list_directly_held(function: Any) -> list[Any] | None:
    """Return the code of a plain function, its globals and its closure; None for anything else."""
    if type(function) is not FunctionType or function.__defaults__:
        return None
    code, known = function.__code__, function.__globals__
    found = [code, *map(known.get, list_global_names(code))]
    if function.__closure__:
        found += collect_closure_variables(function).values()
    return found


def _leads_nowhere(thing: Any) -> bool:
    if type(thing) in _LEAD_NOWHERE or isinstance(thing, (*_HOLD_NOTHING, nn.Module)):
        return True
    return isinstance(thing, FunctionType) and (thing.__module__ or "").startswith("torch.")


def _are_same_or_tensors(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    # A tensor that is bound anew in each step leads to no module.
    return one[1] is other[1] or (isinstance(one[1], Tensor) and other[1] is _A_TENSOR)


def _iterate_near_objects(function: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield what a function holds, by name: objects, members of containers, attributes of objects, and what its own
    functions hold.
    """
    for name, thing in _list_held_objects(function):
        if isinstance(thing, _HOLD_NOTHING):
            continue
        yield name, thing
        if isinstance(thing, _CONTAINERS):
            if len(thing) <= _LONGEST:
                members = thing.items() if isinstance(thing, dict) else enumerate(thing)
                yield from ((f"{name}[{key!r}]", item) for key, item in members if not isinstance(item, _HOLD_NOTHING))
        elif isinstance(thing, FunctionType):
            if depth > 1 and not (thing.__module__ or "").startswith("torch."):
                yield from _iterate_near_objects(thing, depth - 1)
        elif type(thing).__module__ != "builtins" and not isinstance(thing, (Tensor, nn.Module)):
            slots = getattr(type(thing), "__slots__", ())
            for key in (*getattr(thing, "__dict__", ()), *((slots,) if isinstance(slots, str) else slots)):
                item = getattr(thing, key, None)
                if not isinstance(item, _HOLD_NOTHING):
                    yield f"{name}.{key}", item


def _list_held_objects(function: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(function, FunctionType):
        known = function.__globals__
        found = [(name, known[name]) for name in list_global_names(function.__code__) if name in known]
        defaults = ((f"default {place}", value) for place, value in enumerate(function.__defaults__ or ()))
        return [*found, *collect_closure_variables(function).items(), *defaults]
    if isinstance(function, MethodType):
        owner = function.__self__
        return [("self", owner), *(() if isinstance(owner, type) else getattr(owner, "__dict__", {}).items())]
    if isinstance(function, functools.partial):
        arguments = ((f"argument {place}", value) for place, value in enumerate(function.args))
        return [*_list_held_objects(function.func), *arguments, *function.keywords.items()]
    return [("self", function), *getattr(function, "__dict__", {}).items()]


def _have_same_code(a: Any, b: Any) -> bool:
    if isinstance(a, MethodType) and isinstance(b, MethodType):  # Python creates a bound method at each access
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return isinstance(a, FunctionType) and isinstance(b, FunctionType) and a.__code__ is b.__code__


# -- step inputs ------------------------------------------------------------------------------------------------------


class LossFactors(NamedTuple):
    """The factors of one loss before backward."""

    scale: float
    base: float | None
    """The divisor of sums; None for means, and before the first sum."""


class LossReach(NamedTuple):
    """The parameters that one loss leads to."""

    parameters: Sequence[Tensor]
    """The parameters that it trains; gradients of others are ignored."""
    alone: bool
    """Whether backward is unrestricted; with several losses it is restricted to these parameters."""


class TensorNames:
    """Names of tensors outside of modules, by who holds them; searched when one is requested."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        self._roots = ("model", model), ("loss function", loss_fn)
        self._names: dict[int, str] | None = None

    def __call__(self, tensor: Tensor) -> str | None:
        if self._names is None:
            found = [(f"{root}.{name}", thing) for root, top in self._roots for name, thing in iterate_reachable(top)]
            named = [(name, thing) for name, thing in found if isinstance(thing, Tensor)]
            self._names = {key: name for name, key in reversed(_list_storages(named))}
        return self._names.get(identify_storage(tensor))


class StepInputs(NamedTuple):
    """The current step, or the last one. It refers to the batch, which lives until the next step starts."""

    loss_fn: LossFunction | None
    """None in the context form without `rerun`, which cannot be run again."""
    microbatches: Sequence[Any]
    only: str | None
    generators: list[Tensor]
    """torch's generator states before the first micro-batch: the CPU's, then the device's; empty if not recorded."""
    factors: dict[str, LossFactors]
    """By loss, for the losses of this step."""
    versions: tuple[int, ...]
    """The version counter of each tensor of the batch before the step."""
    reaches: dict[str, LossReach] | None = None
    """By loss; None if unknown, as for a step that was read from disk: then everything that the model trains."""
    own_generators: Sequence[tuple[torch.Generator, Tensor]] = ()
    """The generators that the loss function holds, with their states before the first micro-batch."""

    def has(self, objectives: Sequence[Objective]) -> None:
        """Set the losses of this step."""
        assert self.reaches is not None, "read from disk, so it has no new step"
        for objective in objectives:
            loss = objective.loss
            self.factors[loss.name] = LossFactors(loss.scale.value, loss.base_count)
            self.reaches[loss.name] = LossReach(objective.trainable, objective.everywhere)

    def restore_generators(self, device: torch.device) -> None:
        """Set torch's generators to their states before the first micro-batch."""
        if self.generators:
            set_torch_rng_states(self.generators, device)
        for generator, state in self.own_generators:
            generator.set_state(state)

    def with_microbatch(self, loss_fn: LossFunction, batch: Any) -> StepInputs:
        """Return the same step with one more micro-batch, in the context form; the newest loss function runs all."""
        versions = self.versions + list_batch_versions((batch,))
        return self._replace(loss_fn=loss_fn, microbatches=[*self.microbatches, batch], versions=versions)

    def written_tensors(self) -> list[str]:
        """Return the paths of the batch's tensors whose version has increased since the step began."""
        if self.versions == list_batch_versions(self.microbatches):
            return []
        paths = [path for microbatch in self.microbatches for path, _ in iterate_tensor_leaves(microbatch)]
        now = list_batch_versions(self.microbatches)
        return [path for path, a, b in zip(paths, now, self.versions, strict=False) if a != b]

    @property
    def batch_changed(self) -> bool:
        """Whether the batch was written since the step: repeating it would not be the same step."""
        return self.versions != list_batch_versions(self.microbatches)


_SEQUENCES = (tuple, list)
_ONLY_TENSORS = {Tensor}


def list_batch_versions(tree: Sequence[Any]) -> tuple[int, ...]:
    """Return the version counters of a batch's tensors, in order; -1 for inference tensors."""
    if len(tree) == 1 and type(tree[0]) in _SEQUENCES and set(map(type, tree[0])) == _ONLY_TENSORS:
        try:
            return tuple(map(VERSION, tree[0]))
        except RuntimeError:  # inference tensors have none
            pass
    found: list[Tensor] = []
    for microbatch in tree:
        # Most batches are a tensor or a flat sequence of them, and need no search.
        if isinstance(microbatch, Tensor):
            found.append(microbatch)
        elif type(microbatch) in (tuple, list) and all(isinstance(item, Tensor) for item in microbatch):
            found += microbatch
        else:
            found += [leaf for _, leaf in iterate_tensor_leaves(microbatch)]
    return tuple([-1 if tensor.is_inference() else tensor._version for tensor in found])


def find_batch_storages(tree: Sequence[Any]) -> dict[int, str]:
    """Return the storages of a batch's tensors, each with the path of its tensor."""
    return {key: path for path, key in _list_storages(list(iterate_tensor_leaves(list(tree))))}


def _list_storages(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, int]]:
    parts = unwrap_strided_tensors(tensor for _, tensor in named)
    return [(name, key) for (name, _), own in zip(named, parts, strict=True) for key, _ in own]
