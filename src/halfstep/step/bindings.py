"""The attributes of modules: recorded at the start of a window, rebound to the same values if it is not applied.

If a buffer were restored but not the number that belongs to it, the module would be in a state that no step produced: a
cache with the wrong length, a codebook marked as initialized. So all attributes of a module are restored together:
registered buffers and parameters, and plain attributes (numbers, strings, None, enum members and other values that
cannot change, tensors, tuples of these), containers and data objects. No tensor is copied here; what is written into a
container is restored by `containers`.
"""

from __future__ import annotations

import datetime
import enum
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Names: TypeAlias = dict[str, Any]

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


class ScriptedAttributes:
    """The attributes and buffers of a torch.jit module, which are in C++, in the place of a dictionary."""

    def __init__(self, module: Any) -> None:
        self._script = module._c
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

    def put(self, name: str, value: Any) -> None:
        """Bind an attribute to a value."""
        self._script.setattr(name, value)


_MODES = ("training", "_is_full_backward_hook")
"""Attributes of every torch.jit module, which no forward pass writes."""


class _KeptDictionary(NamedTuple):
    """One dictionary of a module, and how it is restored."""

    names: Any
    """A dictionary, or the ScriptedAttributes of a torch.jit module."""
    restore: Callable[[Any, Names], None]
    key: int
    """The id of the dictionary; that of its buffers, for a torch.jit module."""


class ModuleBindings:
    """The attributes of some modules at the last `remember`."""

    def __init__(self) -> None:
        self._kept: list[_KeptDictionary] = []
        self._saved: list[Names] = []
        self._attributes: list[tuple[Names, int]] = []
        """The attributes of each module, with the number of torch's own entries in front."""
        self._scripted: list[int] = []
        """The places of torch.jit modules in `_kept`."""

    def follow(self, modules: Iterable[nn.Module], whole: Iterable[nn.Module] = ()) -> None:
        """Use these modules from now on; of those in `whole`, all attributes are restored."""
        included = {id(part) for module in whole for part in module.modules()}
        followed = list(modules)
        in_python = [module for module in followed if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = [(module.__dict__, _count_torch_entries(module)) for module in in_python]
        self._kept = [
            kept for module in followed for kept in _iterate_dictionaries(module, whole=id(module) in included)
        ]
        self._saved = []
        self._scripted = [place for place, kept in enumerate(self._kept) if kept.restore is _restore_scripted]

    def remember(self) -> None:
        """Save the bindings, before the first micro-batch."""
        self._saved = [kept.names.copy() for kept in self._kept]

    def add(self, module: nn.Module) -> None:
        """Save the bindings of one more module in an open window, before it runs."""
        for kept in _iterate_dictionaries(module, whole=False):
            if kept.restore is _restore_scripted:
                self._scripted.append(len(self._kept))
            self._kept.append(kept)
            self._saved.append(kept.names.copy())

    def attribute_tensors(self) -> list[Tensor]:
        """Return the tensors among plain attributes, quickly, after `remember`: each step asks for them."""
        found = [
            value
            for names, own in self._attributes
            for value in islice(names.values(), own, None)
            if isinstance(value, Tensor) and value.grad_fn is None
        ]
        for place in self._scripted:
            attributes = (self._saved[place][name] for name in self._kept[place].names.attributes)
            found += [value for value in attributes if isinstance(value, Tensor) and value.grad_fn is None]
        return found

    def before(self) -> dict[int, Names]:
        """Return the saved contents of each dictionary, by its id."""
        return {
            kept.key: saved
            if kept.restore is not _restore_scripted
            else {name: value for name, value in saved.items() if name in kept.names.buffers}
            for kept, saved in zip(self._kept, self._saved, strict=True)
        }

    def restore(self) -> None:
        """Bind again what a window has rebound, added or removed."""
        for kept, before in zip(self._kept, self._saved, strict=True):
            kept.restore(kept.names, before)


def list_tensor_attributes(module: nn.Module) -> Names:
    """Return the attributes of a module, among them its tensors that are neither parameters nor buffers."""
    return ScriptedAttributes(module).copy() if isinstance(module, torch.jit.ScriptModule) else module.__dict__


def _count_torch_entries(module: nn.Module) -> int:
    """Return how many of torch's own entries come first among a module's attributes."""
    return len(_STANDARD) if list(islice(module.__dict__, len(_STANDARD))) == _STANDARD else 0


def _iterate_dictionaries(module: nn.Module, *, whole: bool) -> Iterator[_KeptDictionary]:
    # DistributedDataParallel keeps the state of its reducer.
    if isinstance(module, DistributedDataParallel):
        return
    if isinstance(module, torch.jit.ScriptModule):
        scripted = ScriptedAttributes(module)
        if scripted.names:
            yield _KeptDictionary(scripted, _restore_scripted, id(module._buffers))
        return
    for names, restore in (
        (module.__dict__, _restore_all_attributes if whole else _restore_attributes),
        (module._buffers, _restore_registry),
        (module._parameters, _restore_parameters),
    ):
        yield _KeptDictionary(names, restore, id(names))


def _restore_scripted(names: ScriptedAttributes, before: Names) -> None:
    now = names.copy()
    for name, value in before.items():
        if now[name] is not value:
            names.put(name, value)


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
