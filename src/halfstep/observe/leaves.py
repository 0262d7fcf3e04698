"""The tensors of a batch, whatever it is made of, each with the way to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DEEPEST = 8
_MOST = 4096
"""Containers that are looked into: an object of the batch may lead to a whole data set."""
_LONG = 32
"""Items, beyond which a list that begins and ends with a plain value is taken for a list of those."""
_PLAIN = (int, float, str, bytes, complex, type(None))


def leaves(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) in order; a path reads as it would be typed, such as [0]['image'].pixels."""
    return _walk(tree, "", (), iter(range(_MOST)))


def _walk(tree: Any, path: str, above: tuple[int, ...], left: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
        return
    # A container may hold itself.
    if len(above) >= _DEEPEST or id(tree) in above or next(left, None) is None:
        return
    try:
        items = list(_items(tree))
    except Exception:  # somebody's class, which may stumble over being looked at; a step must not
        return
    for step, item in items:
        if not isinstance(item, _PLAIN):
            yield from _walk(item, path + step, (*above, id(tree)), left)


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from ((f".{name}", getattr(tree, name)) for name in tree._fields)
    elif isinstance(tree, (list, tuple)):
        if not _is_of_numbers(tree):
            yield from ((f"[{index}]", item) for index, item in enumerate(tree))
    elif dataclasses.is_dataclass(tree) or _holds_things(tree):
        yield from ((f".{name}", item) for name, item in getattr(tree, "__dict__", {}).items())


def _is_of_numbers(tree: list[Any] | tuple[Any, ...]) -> bool:
    return len(tree) > _LONG and isinstance(tree[0], _PLAIN) and isinstance(tree[-1], _PLAIN)


def _holds_things(tree: Any) -> bool:
    """An object of a person's own class, as batches of graphs are; not a model and not a class."""
    return hasattr(tree, "__dict__") and not isinstance(tree, (type, nn.Module)) and not callable(tree)
