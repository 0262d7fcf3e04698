"""An island: a module that stays in fp32 inside a run of lower precision.

Casting the weights is not enough, because autocast casts them back; switching autocast off is not enough, because the
inputs arrive in 16 bits; and a hook on `forward` is not enough, because `vae.encode(...)` never passes through it. So
every public method of the module becomes an entry that does both. The module changes its class for a subclass of it,
which keeps its name, its parameters, isinstance, deepcopy and pickling as they were.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import WrongUse
from halfstep.formats import is_narrow
from halfstep.precision.precision import widen

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")


@overload
def island(target: M, *paths: str) -> M: ...
@overload
def island(target: Callable[P, R]) -> Callable[P, R]: ...
def island(target: Any, *paths: str) -> Any:
    """Keep a module in fp32, or the modules of a model at `paths`, or a function such as a loss.

    Every public method is an entry; properties and generators are not. Inside a model the output returns to the dtype
    that came in; a loss, and any object whose insides are its own, stays in fp32, because casting a sum back could
    overflow what the island just saved.
    """
    if not isinstance(target, nn.Module):
        return _widened(target)
    for module in [target.get_submodule(path) for path in paths] or [target]:
        _raise_island(module)
        module._halfstep_inside = bool(paths)  # type: ignore[assignment]
    return target


def lift_island(model: nn.Module, path: str) -> None:
    """The module at `path` computes as the rest of the model again; its weights stay in fp32."""
    module = model.get_submodule(path)
    if isinstance(module, Island):
        module.__class__ = module._halfstep_shore  # type: ignore[assignment]
        del module._halfstep_inside


@contextmanager
def trial_island(model: nn.Module, *paths: str) -> Iterator[None]:
    """Islands for as long as it lasts; those that were there before stay."""
    new = {path: module for path in paths if not is_island(module := model.get_submodule(path))}
    stored = [(tensor, tensor.data) for module in new.values() for tensor in (*module.parameters(), *module.buffers())]
    try:
        for path, module in new.items():
            _raise_island(module)
            module._halfstep_inside = bool(path)  # type: ignore[assignment]
        yield
    finally:
        for path in new:
            lift_island(model, path)
        for tensor, data in stored:
            if is_narrow(data.dtype):
                tensor.data = data


def is_island(module: nn.Module) -> bool:
    return isinstance(module, Island)


def islands(model: nn.Module) -> dict[str, nn.Module]:
    """The islands of a model by path; what lies inside one is not listed again."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_island(module) and not any(path.startswith(f"{outer}.") or outer == "" for outer in found):
            found[path] = module
    return found


def settle(model: nn.Module) -> None:
    """Tell the islands below `model` that they lie inside a model, so that their outputs fit what follows them."""
    for path, module in model.named_modules():
        if path and is_island(module) and not isinstance(module, nn.modules.loss._Loss):
            module._halfstep_inside = True  # type: ignore[assignment]


class Island:
    """Marks the classes that `island` makes."""

    _halfstep_inside: bool
    _halfstep_shore: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made at run time cannot be looked up by name; rebuild from the one that can.
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *rest = reduced
        return (_new_island, (self._halfstep_shore, *arguments[1:]), *rest)


def _raise_island(module: nn.Module) -> None:
    if is_island(module):
        return
    _check_can_rise(module)
    for tensor in (*module.parameters(), *module.buffers()):
        if is_narrow(tensor.dtype):
            tensor.data = tensor.data.float()
    module.__class__ = _island_class(type(module))


def _check_can_rise(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        given, do = f"{kind} is a scripted module, whose methods are fixed", "make the island before torch.jit.script"
    elif "forward" in vars(module):
        given, do = f"{kind} has a forward of its own, as torch.compile and hooks set it", "make the island before that"
    elif any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        given, do = f"{kind} has no weights yet, and becomes another class with them", "run a batch through it first"
    else:
        return
    raise WrongUse(given, allowed="modules whose class holds their methods", do=do)


def _new_island(shore: type[nn.Module], *arguments: Any) -> nn.Module:
    cls = _island_class(shore)
    return cls.__new__(cls, *arguments)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""One island class for each class of modules, so that two islands of a kind are of one type."""


def _island_class(shore: type[nn.Module]) -> type[nn.Module]:
    if shore not in _CLASSES:
        _CLASSES[shore] = _make_island_class(shore)
    return _CLASSES[shore]


def _make_island_class(shore: type[nn.Module]) -> type[nn.Module]:
    entries = {name: _entry(method) for name, method in _public_methods(shore)}
    body = {"__module__": shore.__module__, "__doc__": shore.__doc__, "_halfstep_shore": shore, **entries}
    return type(f"Island{shore.__name__}", (Island, shore), body)


def _public_methods(cls: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What callers may call to compute: not private, not torch's own housekeeping, not a generator."""
    for name, member in inspect.getmembers(cls, inspect.isfunction):
        own = name == "forward" or not hasattr(nn.Module, name)
        static = isinstance(inspect.getattr_static(cls, name), staticmethod)
        if own and not static and not name.startswith("_") and not inspect.isgeneratorfunction(member):
            yield name, member


def _entry(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        with torch.autocast(_device_type(given, self), enabled=False):
            out = method(self, *_each_tensor(args, widen), **_each_tensor(kwargs, widen))
        incoming = next((t.dtype for t in given if is_narrow(t.dtype)), None)
        if incoming is None or not self._halfstep_inside:
            return out
        return _each_tensor(out, lambda t: t.to(incoming) if t.dtype is torch.float32 else t)

    return entry


def _widened(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def wide(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(_device_type(_tensors((args, kwargs))), enabled=False):
            return function(*_each_tensor(args, widen), **_each_tensor(kwargs, widen))

    return wide


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors in plain containers; other objects keep what is inside them to themselves."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_each_tensor(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each_tensor(item, change) for item in value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _each_tensor(item, change)) for key, item in value.items())
    return value


def _tensors(value: Any) -> list[Tensor]:
    """The floating tensors that `_each_tensor` would change."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _each_tensor(value, note)
    return found


def _device_type(given: list[Tensor], module: nn.Module | None = None) -> str:
    if not given and module is not None:
        given = list(itertools.islice(itertools.chain(module.parameters(), module.buffers()), 1))
    return given[0].device.type if given else "cpu"
