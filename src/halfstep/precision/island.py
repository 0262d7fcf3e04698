"""Islands: modules that stay in fp32 inside a run of lower precision.

Casting the weights is not enough, because autocast casts them back. Switching autocast off is not enough, because the
inputs arrive in 16 bits. A hook on `forward` is not enough, because `vae.encode(...)` never passes through it. So every
public method of the module becomes an entry that does both. The module's class is replaced by a subclass of it, so the
name, the parameters, isinstance, deepcopy and pickling work as before.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import WrongUse
from halfstep.formats import is_narrow, widen
from halfstep.precision.converted import MARK, record_model_change, restore_layers, suspend_conversion

PLACED = "_halfstep_island_of_policy"
"""The mark of an island that a policy has made."""

# -- running islands --------------------------------------------------------------------------------------------------
# Record which islands are running, for observers. Without an observer it costs one read of an integer.


class _RunningIslands(threading.local):
    """The running islands of each thread: a GPU's backward runs in its own thread, and recomputes forwards there."""

    def __init__(self) -> None:
        self.islands: tuple[object, ...] = ()
        """Modules or functions, outermost first."""


running = _RunningIslands()
_lock = threading.Lock()
_watchers = 0


def has_island_watchers() -> bool:
    """Return whether anything observes islands. torch.compile treats this as a constant."""
    return _watchers > 0


@contextmanager
def mark_island_running(island: object) -> Iterator[None]:
    """Mark an island as running inside the context; islands may be nested."""
    before = running.islands
    running.islands = (*before, island)
    try:
        yield
    finally:
        running.islands = before


def start_watching_islands() -> None:
    """Start recording which islands run. Each call is undone by one call of `stop_watching_islands`."""
    global _watchers
    with _lock:
        _watchers += 1


def stop_watching_islands() -> None:
    """Undo one call of `start_watching_islands`."""
    global _watchers
    with _lock:
        _watchers -= 1


# -- island -----------------------------------------------------------------------------------------------------------


M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")


@overload
def island(target: M, *paths: str) -> M: ...
@overload
def island(target: Callable[P, R]) -> Callable[P, R]: ...
def island(target: Any, *paths: str) -> Any:
    """Keep a module in fp32, or the modules of a model at `paths`, or a function such as a loss.

    Every public method becomes an fp32 entry; properties and generators do not. Inside a model the output is cast back
    to the incoming dtype. A loss stays in fp32, as does any object that is not a plain container, because casting a sum
    back could overflow.

    Args:
        target: A module or a function.
        paths: Names of submodules of `target`; without them, `target` itself becomes the island.

    Returns:
        `target`, or the wrapped function.

    Raises:
        WrongUse: The methods of a module cannot be replaced.
    """
    if not isinstance(target, nn.Module):
        return _wrap_function_in_fp32(target)
    if isinstance(target, torch.jit.ScriptModule):
        _check_can_convert(target)
    for module in [target.get_submodule(path) for path in paths] or [target]:
        restore_layers(module)
        _convert_to_island(module)
        module._halfstep_inside = bool(paths)  # type: ignore[assignment]
    return target


def remove_island(model: nn.Module, path: str) -> None:
    """Undo `island` for the module at `path`; its weights stay in fp32."""
    module = model.get_submodule(path)
    if isinstance(module, Island):
        module.__class__ = module._halfstep_original  # type: ignore[assignment]
        del module._halfstep_inside
        record_model_change()


@contextmanager
def make_temporary_islands(model: nn.Module, *paths: str) -> Iterator[None]:
    """Make the modules at `paths` islands inside the context; existing islands stay."""
    new = {path: module for path in paths if not is_island(module := model.get_submodule(path))}
    stored = [(tensor, tensor.data) for module in new.values() for tensor in (*module.parameters(), *module.buffers())]
    with ExitStack() as active:
        for module in new.values():
            active.enter_context(suspend_conversion(module))
        try:
            for path, module in new.items():
                _convert_to_island(module)
                module._halfstep_inside = bool(path)  # type: ignore[assignment]
            yield
        finally:
            for path in new:
                remove_island(model, path)
            # Raising an island widened these; the old storage is restored itself, so no second rounding happens.
            for tensor, data in stored:
                if is_narrow(data.dtype):
                    tensor.data = data


@contextmanager
def make_temporary_function_islands(model: nn.Module, *functions: FunctionType) -> Iterator[None]:
    """Make Python functions islands inside the context, whoever holds a reference to them.

    A function that calls the model raises WrongUse: an island around it would be another precision.
    """
    kept = [(function, function.__code__, function.__kwdefaults__) for function in functions]
    inside = [0]

    def check_model_outside(_module: nn.Module, _inputs: object) -> None:
        if inside[0]:
            raise WrongUse(
                "an island around a function that calls the model",
                allowed="a function of tensors, such as a loss",
                do="precision='fp32' for the whole step, or an island around a module",
            )

    handle = model.register_forward_pre_hook(check_model_outside)
    try:
        for function, code, defaults in kept:
            plain = FunctionType(
                code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
            )
            plain.__kwdefaults__ = defaults
            # A function accepts only code with as many free variables as it has.
            function.__code__ = _call_island.__code__.replace(co_freevars=code.co_freevars)
            function.__kwdefaults__ = {"_island": _wrap_function_in_fp32(plain), "_inside": inside}
        yield
    finally:
        handle.remove()
        for function, code, defaults in kept:
            function.__code__, function.__kwdefaults__ = code, defaults


def _call_island(*args: Any, _island: Callable[..., Any], _inside: list[int], **kwargs: Any) -> Any:
    _inside[0] += 1
    try:
        return _island(*args, **kwargs)
    finally:
        _inside[0] -= 1


@contextmanager
def widen_outputs(model: nn.Module) -> Iterator[None]:
    """Convert the tensor that a model returns to fp32 inside the context, as `model(x).float()` does."""

    def widen_output(_module: nn.Module, _inputs: object, output: Any) -> Any:
        return _map_tensors(output, widen) if isinstance(output, Tensor) else output

    handle = model.register_forward_hook(widen_output)
    try:
        yield
    finally:
        handle.remove()


def has_precision_changes(model: nn.Module) -> bool:
    """Return whether a precision has converted layers of a model, or made islands of some."""
    return any(MARK in vars(module) or PLACED in vars(module) for module in model.modules())


def undo_policy(model: nn.Module) -> None:
    """Restore the layers that a precision has converted, and lift the islands that its policy made."""
    restore_layers(model)
    for path, module in model.named_modules():
        if vars(module).pop(PLACED, False):
            remove_island(model, path)


def is_island(module: nn.Module) -> bool:
    """Return whether a module is an island."""
    return isinstance(module, Island)


def is_inside(path: str, outer: str) -> bool:
    """Return whether the module at a path is the one at `outer`, or below it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def find_islands(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost islands of a model by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_island(module) and not any(is_inside(path, outer) for outer in found):
            found[path] = module
    return found


def mark_inner_islands(model: nn.Module) -> None:
    """Mark the islands below `model` as inside a model, so that their outputs are cast back for the next layer."""
    for path, module in model.named_modules():
        # A criterion may be a submodule too. Its output is a loss, which stays in fp32.
        if path and is_island(module) and not isinstance(module, nn.modules.loss._Loss):
            module._halfstep_inside = True  # type: ignore[assignment]


class Island:
    """The base of the classes that `island` creates."""

    _halfstep_inside: bool
    _halfstep_original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes created at run time cannot be looked up by name: pickle and deepcopy rebuild from the original one.
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *rest = reduced
        return (_make_island, (self._halfstep_original, *arguments[1:]), *rest)


def _convert_to_island(module: nn.Module) -> None:
    if is_island(module):
        return
    _check_can_convert(module)
    for tensor in (*module.parameters(), *module.buffers()):
        if is_narrow(tensor.dtype):
            # Through .data: the Parameter object stays the same, and an optimizer may already hold it.
            tensor.data = tensor.data.float()
    # Replacing the class, rather than wrapping the module, keeps state_dict keys, isinstance and references intact.
    module.__class__ = _build_island_class(type(module))


def _check_can_convert(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        given, do = f"{kind} is a scripted module, whose methods are fixed", "make the island before torch.jit.script"
    elif "forward" in vars(module):
        given, do = f"{kind} has forward set on the instance, as torch.compile and hooks do", "make the island first"
    elif any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        given, do = f"{kind} has no weights yet, and becomes another class with them", "run a batch through it first"
    else:
        return
    raise WrongUse(given, allowed="modules whose class contains their methods", do=do)


def _make_island(original: type[nn.Module], *arguments: Any) -> nn.Module:
    cls = _build_island_class(original)
    return cls.__new__(cls, *arguments)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""One island class for each module class, so that two islands of a kind have the same type."""


def _build_island_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _CLASSES:
        entries = {name: _wrap_method(method) for name, method in _iterate_public_methods(original)}
        facts = {"__module__": original.__module__, "__doc__": original.__doc__, "_halfstep_original": original}
        _CLASSES[original] = type(f"Island{original.__name__}", (Island, original), {**facts, **entries})
    return _CLASSES[original]


def _iterate_public_methods(cls: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods that compute: not private ones, not nn.Module's own, not generators."""
    for name, member in inspect.getmembers(cls, inspect.isfunction):
        own = name == "forward" or not hasattr(nn.Module, name)
        # isfunction cannot tell a static method from a method, and an entry passes `self`.
        static = isinstance(inspect.getattr_static(cls, name), staticmethod)
        if own and not static and not name.startswith("_") and not inspect.isgeneratorfunction(member):
            yield name, member


def _wrap_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_island_watchers():
            # torch.compile evaluates `has_island_watchers()` while tracing: compiled code does not contain this branch.
            with mark_island_running(self):
                return _call_in_fp32(method, self, args, kwargs)
        return _call_in_fp32(method, self, args, kwargs)

    return entry


def _call_in_fp32(method: Callable[..., Any], self: Any, args: Any, kwargs: Any) -> Any:
    given = _list_floating((args, kwargs))
    # Weights were widened when the island was made. If they are narrow now, FSDP2 has gathered them so.
    first = next(self.parameters(), None)
    stored_wide = first is None or not is_narrow(first.dtype)
    with (
        torch.autocast(_find_device_type(given, self), enabled=False),
        nullcontext() if stored_wide else _use_wide_weights(self),
    ):
        out = method(self, *_map_tensors(args, widen), **_map_tensors(kwargs, widen))
    incoming = next((t.dtype for t in given if is_narrow(t.dtype)), None)
    if incoming is None or not self._halfstep_inside:
        return out
    return _map_tensors(out, lambda t: t.to(incoming) if t.dtype is torch.float32 else t)


@contextmanager
def _use_wide_weights(module: nn.Module) -> Iterator[None]:
    """Compute with fp32 copies of weights that are in 16 bits, as FSDP2 gathers them under a mixed precision policy.

    What FSDP2 rounded stays rounded; the gradient of each copy flows to the weight that it was made from.
    """
    tables = [inner._parameters for inner in module.modules()]
    narrow = [(t, name, p) for t in tables for name, p in t.items() if p is not None and is_narrow(p.dtype)]
    copies = [(table, name, parameter, parameter.float()) for table, name, parameter in narrow]
    for table, name, _, copy in copies:
        table[name] = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, parameter, copy in copies:
            # If FSDP2 has put its shards back in the meantime, they stay.
            if table.get(name) is copy:
                table[name] = parameter


def _wrap_function_in_fp32(function: Callable[P, R]) -> Callable[P, R]:
    def compute(args: Any, kwargs: Any) -> R:
        with torch.autocast(_find_device_type(_list_floating((args, kwargs))), enabled=False):
            return function(*_map_tensors(args, widen), **_map_tensors(kwargs, widen))

    @functools.wraps(function)
    def wide(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_island_watchers():
            with mark_island_running(function):
                return compute(args, kwargs)
        return compute(args, kwargs)

    return wide


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the floating tensors in plain containers; other objects are returned as they are."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    # Exact types: a subclass may have a different constructor.
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, change) for item in value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _map_tensors(item, change)) for key, item in value.items())
    return value


def _list_floating(value: Any) -> list[Tensor]:
    """Return the floating tensors that `_map_tensors` would change."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(value, note)
    return found


def _find_device_type(given: list[Tensor], module: nn.Module | None = None) -> str:
    if not given and module is not None:
        given = list(itertools.islice(itertools.chain(module.parameters(), module.buffers()), 1))
    return given[0].device.type if given else "cpu"
