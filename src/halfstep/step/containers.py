"""The contents of containers that are attributes of modules: saved before a window, put back if it is not applied.

What a module binds is restored by `bindings`; this is what it writes into a list, a dict, a set, a deque, an array of
NumPy or a plain data object. One level is copied, and only of small ones: of a larger one it is known that a step has
changed it. Modules without such attributes cost nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST_MEMBERS = 64
"""The members of a container up to which it is copied before each window."""
MOST_ARRAY_BYTES = 2**16
"""The size of an array up to which it is copied; of a larger one the first bytes are compared."""
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
"""Exactly these types: others may be frozen, or compute what they hold."""
_SEARCHES = 2
"""Windows that search the modules again: containers are often made by the first forward pass."""


class _Place(NamedTuple):
    """An attribute of a module that has held a container."""

    name: str
    attributes: dict[str, Any]
    key: str
    whole: bool
    """Whether the module is included, so that containers of any size are copied."""


class _SavedContents(NamedTuple):
    """The contents of one container before the window."""

    name: str
    container: Any
    before: Any
    """A copy, or for one that is not restored, a part that shows whether it has changed."""
    restored: bool


class ContainerContents:
    """The contents of the containers of some modules at the last `remember`."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, nn.Module, bool]] = []
        self._places: list[_Place] = []
        self._saved: list[_SavedContents] = []
        self._searches = 0

    def follow(self, modules: Iterable[tuple[str, nn.Module]], whole: Iterable[nn.Module] = ()) -> None:
        """Use these modules from now on; of those in `whole`, containers of any size are restored."""
        included = {id(part) for module in whole for part in module.modules()}
        self._modules = [
            (path, module, id(module) in included)
            for path, module in modules
            if id(module) in included or not _is_without_containers(module)
        ]
        self.search_again()

    def search_again(self) -> None:
        """Search the modules for containers before each of the next windows."""
        self._searches = _SEARCHES

    def remember(self) -> None:
        """Save the contents, before the first micro-batch."""
        if self._searches:
            self._searches -= 1
            self._places = [place for module in self._modules for place in _iterate_places(*module)]
        self._saved = [saved for place in self._places if (saved := _save_contents(place)) is not None]

    def add(self, path: str, module: nn.Module) -> None:
        """Save the contents of one more module in an open window, before it runs."""
        if not _is_without_containers(module):
            found = list(_iterate_places(path, module, False))
            self._places += found
            self._saved += [saved for place in found if (saved := _save_contents(place)) is not None]

    def changed(self) -> list[str]:
        """Return the names of containers that this window has changed and `restore` does not restore."""
        return [
            saved.name for saved in self._saved if not saved.restored and _has_changed(saved.container, saved.before)
        ]

    def restore(self) -> None:
        """Put back what a window has written into containers."""
        for saved in self._saved:
            if saved.restored:
                _refill(saved.container, saved.before)

    def release(self) -> None:
        """Let go of the members, after the window."""
        self._saved = []


def _is_without_containers(module: nn.Module) -> bool:
    """Return whether the lists of a module are those of torch: settings that no forward pass writes."""
    return type(module).__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule)


def _iterate_places(path: str, module: nn.Module, whole: bool) -> Iterator[_Place]:
    for key, value in module.__dict__.items():
        if key not in _TORCH_ENTRIES and (type(value) in _CONTAINERS or _is_array(value) or _holds_tensors(value)):
            yield _Place(f"{path}.{key}" if path else key, module.__dict__, key, whole)


_TORCH_ENTRIES = frozenset(nn.Module().__dict__)


def _is_array(value: Any) -> bool:
    # Not imported here: without NumPy, no value is one of its arrays.
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _holds_tensors(value: Any) -> bool:
    """Return whether an object of no library's own has a tensor or an array among its attributes."""
    if isinstance(value, (Tensor, nn.Module, type)) or type(value).__module__.startswith("torch."):
        return False
    attributes = getattr(value, "__dict__", None)
    return type(attributes) is dict and any(isinstance(held, Tensor) or _is_array(held) for held in attributes.values())


def _save_contents(place: _Place) -> _SavedContents | None:
    value: Any = place.attributes.get(place.key)
    if type(value) in _CONTAINERS:
        if place.whole or len(value) <= MOST_MEMBERS:
            return _SavedContents(place.name, value, value.copy(), True)
    elif _is_array(value):
        if not value.flags.writeable:
            return None
        if place.whole or value.nbytes <= MOST_ARRAY_BYTES:
            return _SavedContents(place.name, value, value.copy(), True)
    elif _holds_tensors(value):
        attributes = value.__dict__
        plain_data = isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value)
        if plain_data and len(attributes) <= MOST_MEMBERS:
            return _SavedContents(place.name, attributes, attributes.copy(), True)
    else:
        return None
    return _SavedContents(place.name, value, _outline(value), False)


def _outline(value: Any) -> tuple[Any, list[Any]]:
    """Return a small part of a large container, or of an object, that differs once a step has replaced its tensors.

    These are values to compare and members to compare by identity; a member that is held cannot have its id reused.
    """
    if _is_array(value):
        flat = value.reshape(-1)[: max(1, MOST_ARRAY_BYTES // max(1, value.itemsize))]
        return (value.shape, flat.tobytes()), []
    if isinstance(value, dict):
        return len(value), list(islice(reversed(value.values()), 1))
    if isinstance(value, (list, deque)):
        return len(value), [value[0], value[-1]] if value else []
    if isinstance(value, set):
        return len(value), []
    held = {key: item for key, item in value.__dict__.items() if isinstance(item, Tensor) or _is_array(item)}
    return list(held), list(held.values())


def _has_changed(value: Any, before: tuple[Any, list[Any]]) -> bool:
    now = _outline(value)
    same = now[0] == before[0] and len(now[1]) == len(before[1])
    return not (same and all(map(is_, now[1], before[1])))


def _refill(container: Any, before: Any) -> None:
    """Give a container the members that it had."""
    if isinstance(container, (dict, set)):
        container.clear()
        container.update(before)
    elif _is_array(container):
        if container.shape != before.shape:
            container.resize(before.shape, refcheck=False)
        container[...] = before
    elif len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
        container.clear()
        container.extend(before)
