"""The tensors of a batch, whatever it is made of, each with the way to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DEEPEST = 8


def leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) in order; a path reads as it would be typed, such as [0]['image'].pixels."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    if depth < _DEEPEST:
        for step, item in _items(tree):
            yield from leaves(item, path + step, depth + 1)


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from ((f".{name}", getattr(tree, name)) for name in tree._fields)
    elif isinstance(tree, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(tree))
    elif dataclasses.is_dataclass(tree) or _holds_things(tree):
        yield from ((f".{name}", item) for name, item in vars(tree).items())


def _holds_things(tree: Any) -> bool:
    """An object of a person's own class, as batches of graphs are; not a model and not a class."""
    return hasattr(tree, "__dict__") and not isinstance(tree, (type, nn.Module)) and not callable(tree)
