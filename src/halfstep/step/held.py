"""What a loss function brings with it: a second model, random numbers of its own."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_DEEPEST = 3
"""Functions that hold functions."""


class OwnGenerators:
    """Random numbers that a loss function brings with it. They are looked for once, while it is the same function."""

    def __init__(self) -> None:
        self._function: Any = None
        self._held: list[torch.Generator] = []

    def states(self, function: Any) -> list[tuple[torch.Generator, Tensor]]:
        """Each with its state now."""
        if function is not self._function:
            self._function, self._held = function, held_by(function, torch.Generator)
        return [(generator, generator.get_state()) for generator in self._held] if self._held else []


def held_by(function: Any, kind: type[T]) -> list[T]:
    """Of this kind: closed over, global, bound, or given beforehand; each once. What these hold is not looked at."""
    seen, level = {id(function): function}, [function]
    for _ in range(_DEEPEST):
        found = {id(item): item for thing in level for item in _held(thing)}
        level = [item for key, item in found.items() if key not in seen]
        seen.update(found)
    return [item for item in seen.values() if isinstance(item, kind)]


def _held(thing: Any) -> list[Any]:
    if isinstance(thing, FunctionType):
        # There are many of torch's, and none of them holds anything of a person's.
        return [] if (thing.__module__ or "").startswith("torch.") else _of_function(thing)
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__, *getattr(thing.__self__, "__dict__", {}).values()]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if callable(thing) and not isinstance(thing, (type, nn.Module)):
        return list(getattr(thing, "__dict__", {}).values())
    return []


def _of_function(function: FunctionType) -> list[Any]:
    known = function.__globals__
    found = [known[name] for name in _names(function.__code__) if name in known]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    return found + list(function.__defaults__ or ())


@functools.lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    """Those of a comprehension or a lambda inside, too."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inside for name in names))))
