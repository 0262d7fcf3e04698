"""Find everything that a function or an object leads to: closures, globals, attributes, containers, with names."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfstep.random_state import GeneratorObject, is_generator

_DEEPEST_LEAF = 8
_MOST_LEAVES = 4096
"""Containers that are searched: an object in the batch may lead to a whole data set."""
_LONG = 32
"""Items beyond which a list whose first and last values are plain is assumed to contain only plain values."""
_PLAIN = (int, float, str, bytes, complex, type(None))


def iterate_tensor_leaves(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) in order; a path reads as it would be typed, such as [0]['image'].pixels."""
    # The iterator is a budget that the whole walk shares.
    return _walk_leaves(tree, "", (), iter(range(_MOST_LEAVES)))


def _walk_leaves(tree: Any, path: str, above: tuple[int, ...], left: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
        return
    # A container may hold itself.
    if len(above) >= _DEEPEST_LEAF or id(tree) in above or next(left, None) is None:
        return
    try:
        items = list(_iterate_leaf_items(tree))
    except Exception:  # a user's class may raise on access, and a step must not fail for that
        return
    for step, item in items:
        if not isinstance(item, _PLAIN):
            yield from _walk_leaves(item, path + step, (*above, id(tree)), left)


def _iterate_leaf_items(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from ((f".{name}", getattr(tree, name)) for name in tree._fields)
    elif isinstance(tree, (list, tuple)):
        if not (len(tree) > _LONG and isinstance(tree[0], _PLAIN) and isinstance(tree[-1], _PLAIN)):
            yield from ((f"[{index}]", item) for index, item in enumerate(tree))
    elif dataclasses.is_dataclass(tree) or _is_user_object(tree):
        yield from ((f".{name}", item) for name, item in getattr(tree, "__dict__", {}).items())


def _is_user_object(tree: Any) -> bool:
    """Return whether this is an object of a user's class, such as a batch of graphs; not a model, not a class."""
    return hasattr(tree, "__dict__") and not isinstance(tree, (type, nn.Module)) and not callable(tree)


T = TypeVar("T")
_DEEPEST = 6
_MOST = 4096
"""Objects that are visited: an object may lead to a whole program."""
_LONGEST = 256
"""Items of one container."""
_METHODS = (MethodType, BuiltinFunctionType)
_ENDS = (str, bytes, int, float, complex, type(None), type, ModuleType, BuiltinFunctionType, Tensor, torch.Generator)
"""Types that lead nowhere."""


def iterate_reachable(*roots: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, object), nearest first and each object once; a root's own name is empty."""
    seen = {id(root) for root in roots}
    left: deque[tuple[str, Any, int]] = deque(("", root, 0) for root in roots)
    looked_at = 0
    while left and looked_at < _MOST:
        name, thing, depth = left.popleft()
        looked_at += 1
        yield name, thing
        if depth == _DEEPEST or isinstance(thing, _ENDS):
            continue
        try:
            items = list(islice(_iterate_held_items(thing), _LONGEST))
        except Exception:  # a user's class may raise on access
            continue
        for step, item in items:
            if id(item) not in seen and not isinstance(item, (int, float, str, bytes, type(None))):
                seen.add(id(item))
                left.append((f"{name}{step}" if name else step.lstrip("."), item, depth + 1))


def find_reachable_instances(root: Any, kind: type[T]) -> list[T]:
    """Return all objects of this type that a function or an object leads to, nearest first."""
    return [thing for _, thing in iterate_reachable(root) if isinstance(thing, kind)]


def select_outermost_modules(found: Iterable[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the modules that are neither in the model nor inside another one of those found, in their order."""
    modules, known = list(found), {id(part) for part in model.modules()}
    kept = set()
    # The largest first: a part may be found before the whole that holds it.
    for module in sorted(modules, key=lambda m: -sum(1 for _ in m.modules())):
        if id(module) not in known:
            kept.add(id(module))
            known.update(map(id, module.modules()))
    return [module for module in modules if id(module) in kept]


def collect_closure_variables(function: Any) -> dict[str, object]:
    """Return the closure of a function by name, without variables that are not bound yet; empty for other objects."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    found = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return found


def find_generators(*roots: Any) -> list[GeneratorObject]:
    """Return the random number generators of torch, NumPy and Python that these lead to."""
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    return select_generators([*(thing for _, thing in iterate_reachable(*roots)), *modules])


def select_generators(found: Iterable[Any]) -> list[GeneratorObject]:
    """Return the random number generators among the objects found, and those that modules and functions hold."""
    generators: dict[int, GeneratorObject] = {}
    for thing in found:
        # Also private attributes of modules, which the search does not follow, and methods such as Random().random.
        near = vars(thing).values() if isinstance(thing, nn.Module) else (thing,)
        own = (getattr(each, "__self__", None) if isinstance(each, _METHODS) else each for each in near)
        generators |= {id(each): each for each in own if is_generator(each)}
    return list(generators.values())


def _iterate_held_items(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, FunctionType):
        # torch has many functions, and none of them holds objects of a user.
        if not (thing.__module__ or "").startswith("torch."):
            yield from ((f".{name}", item) for name, item in collect_closure_variables(thing).items())
            known = thing.__globals__
            yield from ((f".{name}", known[name]) for name in list_global_names(thing.__code__) if name in known)
            yield from (("", item) for item in thing.__defaults__ or ())
            yield from ((f".{name}", item) for name, item in (thing.__kwdefaults__ or {}).items())
    elif isinstance(thing, MethodType):
        yield from (("", thing.__func__), ("", thing.__self__))
    elif isinstance(thing, functools.partial):
        yield from [("", thing.func), *((f"[{n}]", item) for n, item in enumerate(thing.args))]
        yield from ((f".{name}", item) for name, item in thing.keywords.items())
    elif isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", item) for number, item in enumerate(thing))
    else:
        held: dict[str, object] = getattr(thing, "__dict__", {})
        if isinstance(thing, nn.Module):
            yield from ((f".{name}", module) for name, module in thing._modules.items())
            held = {name: item for name, item in held.items() if not name.startswith("_")}
        yield from ((f".{name}", item) for name, item in held.items())


@functools.lru_cache(maxsize=256)
def list_global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that code uses, including those of comprehensions and lambdas inside it."""
    inside = (list_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inside for name in names))))
