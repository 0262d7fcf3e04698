"""What a step watches: modules, what they bind, and the parameters of the optimizers.

Everything is read before each window and compared by identity with the last time, in a few passes without bytecode per
item and without a look at any number. A change gives a new version, on which those who keep lists rebuild them.

What modules bind is saved as well, and bound again if the window is not applied. If a buffer were restored but not the
number that belongs to it, the module would be in a state that no step produced: a cache with the wrong length, a
codebook marked as initialized. So all attributes of a module are restored together: registered buffers and parameters,
and plain attributes (numbers, strings, None, enum members and other values that cannot change, tensors, tuples of
these), containers and data objects. No tensor is copied here; items written into a container are restored by
`containers`.
"""

from __future__ import annotations

import datetime
import enum
import numbers
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

OUTSIDE_MODEL = "(outside the model)."
"""The prefix of names of modules and tensors that do not belong to the model."""

# -- passes -----------------------------------------------------------------------------------------------------------
# One property of many tensors, or the values of many dictionaries, without bytecode per item.

_PROPERTIES: Any = Tensor
POINTER, STRIDE = _PROPERTIES.data_ptr, _PROPERTIES.stride
SHAPE, GRAD, VERSION = _PROPERTIES.shape.__get__, _PROPERTIES.grad.__get__, _PROPERTIES._version.__get__
IS_SPARSE, _REQUIRES_GRAD = _PROPERTIES.is_sparse.__get__, _PROPERTIES.requires_grad.__get__
_DTYPE, _SET_GRAD = _PROPERTIES.dtype.__get__, _PROPERTIES.grad.__set__

Names: TypeAlias = dict[str, Any]


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether these are the same objects: comparing the contents of tensors would read the device."""
    return len(one) == len(other) and all(map(is_, one, other))


def read_values(dictionaries: Iterable[dict[str, Any]]) -> list[Any]:
    """Return the values of all of these dictionaries."""
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def read_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version counters."""
    return list(map(VERSION, tensors))


def read_places(tensors: Sequence[Tensor]) -> list[Any]:
    """Return where tensors are in memory: addresses and shapes."""
    return [*map(POINTER, tensors), *map(SHAPE, tensors)]


def read_views(tensors: Sequence[Tensor]) -> list[Any]:
    """Return addresses, shapes and strides of tensors."""
    return [*map(POINTER, tensors), *map(SHAPE, tensors), *map(STRIDE, tensors)]


def read_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist."""
    found = list(map(GRAD, parameters))
    return [gradient for gradient in found if gradient is not None] if any(map(is_, found, repeat(None))) else found


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Set all gradients to None rather than zeros, which an optimizer would apply with momentum and weight decay."""
    deque(map(_SET_GRAD, parameters, repeat(None)), 0)


def read_version_counter(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def list_optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, over all of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- buffers ----------------------------------------------------------------------------------------------------------

Slots: TypeAlias = dict[str, Tensor | None]


class Buffers:
    """The registered buffers of some modules at any time: BatchNorm statistics, counters, masks."""

    def __init__(self, *models: nn.Module) -> None:
        modules = ((path, module) for model in models for path, module in model.named_modules())
        # The `_buffers` dictionaries themselves: walking a model's modules costs more than copying its buffers.
        unique = {id(m): (f"{path}." if path else "", m._buffers) for path, m in modules}
        self._slots: list[tuple[str, Slots]] = list(unique.values())
        self._plain, self._scripted = _divide_by_kind([slots for _, slots in self._slots])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the buffers that are registered now."""
        return (buffer for buffer in self.values() if buffer is not None)

    def values(self) -> list[Tensor | None]:
        """Return the registered buffers, in the same order each time."""
        return _read_all(self._plain, self._scripted)

    def named(self) -> dict[str, Tensor]:
        """Return the registered buffers by name."""
        return {name: buffer for name, buffer in self.registered().items() if buffer is not None}

    def registered(self) -> dict[str, Tensor | None]:
        """Return the registered buffers by name, including those registered as None."""
        return {path + name: buffer for path, slots in self._slots for name, buffer in slots.items()}

    def names(self) -> set[str]:
        """Return the names of all registered buffers, including those registered as None."""
        return set(self.registered())


def find_buffer(slots: Slots, name: str) -> Tensor | None:
    """Return the buffer that is registered under a name, or None."""
    return slots[name] if name in slots else None  # noqa: SIM401 (those of torch.jit modules have no `get`)


def put_buffer(slots: Slots, name: str, value: Tensor | None) -> None:
    """Copy into the registered tensor, which other code may hold; replace it by a copy if that is impossible."""
    buffer = find_buffer(slots, name)
    try:
        if buffer is not None and value is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)
            return
    except RuntimeError:  # expanded: several of its elements share one place in memory
        pass
    slots[name] = None if value is None else value.clone()


def _divide_by_kind(dictionaries: Iterable[Any]) -> tuple[list[Names], list[Any]]:
    """Return the dictionaries, and the objects in their place that modules of torch.jit have."""
    plain: list[Names] = []
    scripted: list[Any] = []
    for slots in dictionaries:
        (plain if isinstance(slots, dict) else scripted).append(slots)
    return plain, scripted


def _read_all(plain: list[Names], scripted: list[Any]) -> list[Any]:
    found = read_values(plain)
    for slots in scripted:
        found += slots.values()
    return found


# -- census -----------------------------------------------------------------------------------------------------------


class Census:
    """The modules of a model and those around it, with what they bind, and the parameters of the optimizers.

    Without a model, the included modules take its place.
    """

    def __init__(self, model: nn.Module | None = None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self.included: list[nn.Module] = []
        self._beside: list[nn.Module] = []
        self._ran: list[weakref.ref[nn.Module]] = []
        self._members: list[Any] = []
        self._keys: list[str] = []
        self._kinds: tuple[list[bool], list[torch.dtype]] = [], []
        self.version = self.members = self.kinds = 0
        self.take()

    # -- scope --------------------------------------------------------------------------------------------------

    def include(self, module: nn.Module) -> None:
        """Watch one more module, and restore all of its attributes."""
        self.included.append(module)
        self._stale = True

    def look_beside(self, modules: Sequence[nn.Module]) -> None:
        """Watch the modules that the loss function holds."""
        if not are_same(modules, self._beside):
            self._beside = list(modules)
            self._stale = True

    def add(self, module: nn.Module) -> list[nn.Module]:
        """Watch a module that is about to run in an open window; return its parts that are new, whose bindings are
        saved.
        """
        if id(module) in self._known or isinstance(module, DistributedDataParallel):
            return []
        found = [part for part in module.modules() if id(part) not in self._known]
        self._known |= set(map(id, found))
        self._added += [saved for part in found for saved in _save_module(part)]
        self._ran.append(weakref.ref(module, self._went))
        self._stale = True
        return found

    def _went(self, _reference: object) -> None:
        self._stale = True

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        ran = [(reference, reference()) for reference in self._ran]
        self._ran = [reference for reference, module in ran if module is not None]
        outside = chain(self._beside, self.included, (module for _, module in ran if module is not None))
        seen: set[int] = set()
        for prefix, top in (
            *((("", self._model),) if self._model is not None else ()),
            *((OUTSIDE_MODEL + type(module).__name__, module) for module in outside),
        ):
            for path, module in top.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield ".".join(filter(None, (prefix, path))), module

    # -- changes ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Compare modules and parameters with the last time.

        `version` increases with any change, `members` if modules or parameters of the model were added, removed or
        renamed, or parameters of an optimizer, and `kinds` if parameters were frozen, unfrozen or cast.
        """
        if (
            self._stale
            or not are_same(self._read_members(), self._members)
            or list(chain.from_iterable(self._slots)) != self._keys
        ):
            self.take()
        elif self._kinds_differ():
            self._note_kinds()
            self.kinds += 1
            self.version += 1

    def _read_members(self) -> list[Any]:
        found = _read_all(self._slots, self._scripted_slots)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += group["params"]
        return found

    def _kinds_differ(self) -> bool:
        trained, dtypes = self._kinds
        return list(map(_REQUIRES_GRAD, self._parameters)) != trained or list(map(_DTYPE, self._parameters)) != dtypes

    def _note_kinds(self) -> None:
        self._kinds = list(map(_REQUIRES_GRAD, self._parameters)), list(map(_DTYPE, self._parameters))
        owned = {id(p) for optimizer in self._optimizers for p in list_optimizer_parameters(optimizer)}
        self.unowned = [p for p in self._parameters if p.requires_grad and id(p) not in owned]
        """Trainable parameters that no optimizer owns: their gradients must not accumulate over the steps."""

    def take(self) -> None:
        """List everything anew."""
        self._stale = False
        self.modules = list(self._named_modules())
        self._known = {id(module) for _, module in self.modules}
        tops = self.included if self._model is None else [self._model]
        tracked = list({id(module): module for top in tops for module in top.modules()}.values())
        # The modules' own dictionaries, which stay the same objects: no walk over the model before each window.
        self._slots, self._scripted_slots = _divide_by_kind(s for m in tracked for s in (m._modules, m._parameters))
        before, kinds, self._members = self._members, self._kinds, self._read_members()
        keys, self._keys = self._keys, list(chain.from_iterable(self._slots))
        unique = {id(member): member for member in self._members if isinstance(member, Tensor)}
        self._parameters = list(unique.values())
        self._note_kinds()
        same = are_same(before, self._members) and keys == self._keys
        self.members += not same
        self.kinds += same and kinds != self._kinds
        self.version += 1
        self._list_dictionaries({id(module) for module in tracked})

    # -- what modules bind --------------------------------------------------------------------------------------

    def _list_dictionaries(self, tracked: set[int]) -> None:
        whole = {id(part) for module in self.included for part in module.modules()}
        every = [module for _, module in self.modules]
        self._buffers, self._scripted_buffers = _divide_by_kind(module._buffers for module in every)
        self._saved_buffers: list[Names] | None = None
        """The contents of the dictionaries of buffers; None before they are known."""
        self._scripts = [
            script for module in every if isinstance(module, torch.jit.ScriptModule) for script in _list_scripts(module)
        ]
        self._saved_scripts: list[Names] = []
        plain = [module for module in every if _has_python_attributes(module)]
        self._attributes = [module.__dict__ for module in plain]
        self._torch_entries = [_count_torch_entries(module) for module in plain]
        """The number of torch's own entries in front of each module's attributes."""
        self._is_whole = [id(module) in whole for module in plain]
        self._saved_attributes: list[Names] = []
        # Of the model, they are compared by `update`; only those of other modules are copied in each window.
        self._own_parameters = [
            (module._parameters, module._parameters.copy()) for module in plain if id(module) in tracked
        ]
        self._other_parameters = [module._parameters for module in plain if id(module) not in tracked]
        self._saved_parameters: list[Names] = []
        self._types: list[type] = []
        self._places: list[int] = []
        self._known_buffers: list[Any] = []
        self._known_names: list[str] = []
        self._added: list[_SavedDictionary | _SavedScript] = []

    def remember(self) -> list[Tensor | None]:
        """Save what modules bind, before the first micro-batch; return the buffers and the tensors among attributes."""
        self._saved_attributes = list(map(dict.copy, self._attributes))
        if self._other_parameters:
            self._saved_parameters = list(map(dict.copy, self._other_parameters))
        if self._added:
            self._added = []
        found = read_values(self._buffers)
        names = list(chain.from_iterable(self._buffers))
        if self._saved_buffers is None or names != self._known_names or not are_same(found, self._known_buffers):
            self._saved_buffers = list(map(dict.copy, self._buffers))
            self._known_buffers, self._known_names = found.copy(), names
        found += self._read_attribute_tensors()
        if self._scripts or self._scripted_buffers:
            found += self._remember_scripts()
        return found

    def _read_attribute_tensors(self) -> list[Tensor]:
        own = map(islice, map(dict.values, self._saved_attributes), self._torch_entries, repeat(None))
        values = list(chain.from_iterable(own))
        types = list(map(type, values))
        if types != self._types:
            self._types = types
            self._places = [place for place, kind in enumerate(types) if issubclass(kind, Tensor)]
        return [value for place in self._places if (value := values[place]).grad_fn is None]

    def _remember_scripts(self) -> list[Any]:
        self._saved_scripts = [script.copy() for script in self._scripts]
        found = [buffer for slots in self._scripted_buffers for buffer in slots.values()]
        for script, saved in zip(self._scripts, self._saved_scripts, strict=True):
            values = (saved[name] for name in script.attributes)
            found += [value for value in values if isinstance(value, Tensor) and value.grad_fn is None]
        return found

    def buffers_before(self) -> dict[str, Tensor | None]:
        """Return the buffers at the last `remember` by name."""
        saved = dict(zip(map(id, self._buffers), self._saved_buffers or (), strict=False))
        for script, values in zip(self._scripts, self._saved_scripts, strict=False):
            saved[script.key] = {name: value for name, value in values.items() if name in script.buffers}
        return {
            f"{path}.{key}" if path else key: buffer
            for path, module in self.modules
            for key, buffer in saved.get(id(module._buffers), {}).items()
        }

    def restore(self) -> None:
        """Bind again what a window has rebound, added or removed."""
        for names, before, whole in zip(self._attributes, self._saved_attributes, self._is_whole, strict=False):
            (_restore_all_attributes if whole else _restore_attributes)(names, before)
        for names, before in zip(self._buffers, self._saved_buffers or (), strict=False):
            _restore_registry(names, before)
        for names, before in chain(
            self._own_parameters, zip(self._other_parameters, self._saved_parameters, strict=False)
        ):
            _restore_parameters(names, before)
        for script, before in zip(self._scripts, self._saved_scripts, strict=False):
            script.restore(before)
        for saved in self._added:
            saved.restore()


# -- saved bindings ---------------------------------------------------------------------------------------------------


class _SavedDictionary:
    """The contents of one dictionary of a module that first runs in an open window."""

    def __init__(self, names: Names, restore: Callable[[Names, Names], None]) -> None:
        self._names, self._before, self._restore = names, names.copy(), restore

    def restore(self) -> None:
        """Bind again what the window has rebound, added or removed."""
        self._restore(self._names, self._before)


class _SavedScript:
    """The attributes of one module of torch.jit that first runs in an open window."""

    def __init__(self, script: ScriptedAttributes) -> None:
        self._script, self._before = script, script.copy()

    def restore(self) -> None:
        """Set again what the window has changed."""
        self._script.restore(self._before)


def _save_module(module: nn.Module) -> list[_SavedDictionary | _SavedScript]:
    if isinstance(module, torch.jit.ScriptModule):
        return [_SavedScript(script) for script in _list_scripts(module)]
    if not _has_python_attributes(module):
        return []
    return [
        _SavedDictionary(module.__dict__, _restore_attributes),
        _SavedDictionary(module._buffers, _restore_registry),
        _SavedDictionary(module._parameters, _restore_parameters),
    ]


def _has_python_attributes(module: nn.Module) -> bool:
    # DistributedDataParallel keeps the state of its reducer, and modules of torch.jit keep theirs in C++.
    return not isinstance(module, (DistributedDataParallel, torch.jit.ScriptModule))


class ScriptedAttributes:
    """The attributes and buffers of a torch.jit module, which are in C++, in the place of a dictionary."""

    def __init__(self, module: Any) -> None:
        self._script = module._c
        self.key = id(module._buffers)
        self.buffers = frozenset(module._buffers.keys())
        # A frozen module has constants instead of attributes, and nothing that lists those which it keeps.
        kind = vars(module).get("_concrete_type") or getattr(
            vars(module).get("_actual_script_module"), "_concrete_type", None
        )
        of_type = {} if kind is None else kind.get_attributes()
        own = [name for name, (_, is_parameter) in of_type.items() if not is_parameter and name not in _MODES]
        # The type of an attribute never changes there, but for None of an optional one.
        self.names = [name for name in own if is_plain(self._script.getattr(name))]
        self.attributes = [name for name in self.names if name not in self.buffers]
        """The names of those that are no buffers."""

    def copy(self) -> Names:
        """Return the current values; tensors are the same objects each time."""
        return {name: self._script.getattr(name) for name in self.names}

    def restore(self, before: Names) -> None:
        """Bind each attribute to the value that it had."""
        now = self.copy()
        for name, value in before.items():
            if now[name] is not value:
                self._script.setattr(name, value)


_MODES = ("training", "_is_full_backward_hook")
"""Attributes of every torch.jit module, which no forward pass writes."""


def _list_scripts(module: nn.Module) -> list[ScriptedAttributes]:
    script = ScriptedAttributes(module)
    return [script] if script.names else []


def list_tensor_attributes(module: nn.Module) -> Names:
    """Return the attributes of a module, among them its tensors that are neither parameters nor buffers."""
    return ScriptedAttributes(module).copy() if isinstance(module, torch.jit.ScriptModule) else module.__dict__


def _count_torch_entries(module: nn.Module) -> int:
    """Return how many of torch's own entries come first among a module's attributes."""
    return len(_STANDARD) if list(islice(module.__dict__, len(_STANDARD))) == _STANDARD else 0


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Tensor)
_IMMUTABLE: tuple[type, ...] = (
    numbers.Number,  # Fraction, Decimal, the numbers of NumPy
    enum.Enum,
    range,
    slice,
    frozenset,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    os.PathLike,
    torch.layout,
    torch.memory_format,
    type(...),
)
"""Further types of values that cannot change: binding one again restores it."""
_STANDARD = list(nn.Module().__dict__)
_REGISTRIES = frozenset(_STANDARD) - {"training"}
"""Attributes that every module has: torch's own registries, which are not plain values."""
_MISSING = object()


def is_plain(value: Any) -> bool:
    """Return whether binding a value again is enough to restore it: a number, a string, a tensor, a tuple of these."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    # Not imported here: without NumPy, no value is one of its scalars, such as `numpy.bool_`, which is no Number.
    numpy = sys.modules.get("numpy")
    return (
        isinstance(value, _IMMUTABLE)
        or (numpy is not None and isinstance(value, numpy.generic))
        or _is_frozen_dataclass(value)
    )


def _is_frozen_dataclass(value: Any) -> bool:
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and bool(params.frozen)


def _restore_attributes(names: Names, before: Names) -> None:
    for name, value in before.items():
        if names.get(name, _MISSING) is not value and _is_data(value) and name not in _REGISTRIES:
            names[name] = value
    if len(names) != len(before) or names.keys() != before.keys():
        for name in [name for name, value in names.items() if name not in before and _is_data(value)]:
            del names[name]


def _is_data(value: Any) -> bool:
    """Return whether an attribute is restored: modules, functions and classes are no state of a step."""
    return is_plain(value) or not callable(value)


def _restore_all_attributes(names: Names, before: Names) -> None:
    for name, value in before.items():
        if name not in _REGISTRIES:
            names[name] = value
    for name in names.keys() - before.keys():
        del names[name]


def _restore_registry(names: Names, before: Names) -> None:
    if names.keys() != before.keys() or any(names[name] is not value for name, value in before.items()):
        names.clear()
        names.update(before)


def _restore_parameters(names: Names, before: Names) -> None:
    # FSDP2 itself exchanges shards for whole parameters in forward.
    if not any(hasattr(parameter, "__tensor_flatten__") for parameter in (*names.values(), *before.values())):
        _restore_registry(names, before)
