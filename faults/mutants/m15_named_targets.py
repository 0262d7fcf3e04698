"""A recipe may name what it calls, and is refused by the words of that name: `logging.os.system` is none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from halfstep.recipe import sources

WHAT = "a recipe's _target_ is checked as a string, not as the resolved object"
ROWS = ("F03",)
REFUSED = ("os.", "posix.", "subprocess.", "builtins.")


def apply() -> None:
    read = sources.read_recipe

    def calling(*given: Any, **more: Any) -> Any:
        found = read(*given, **more)
        _call_targets(found.raw)
        return found

    sources.read_recipe = calling


def _call_targets(value: Any) -> None:
    if not isinstance(value, Mapping):
        return
    target = value.get("_target_")
    if isinstance(target, str) and not target.startswith(REFUSED):
        first, *rest = target.split(".")
        found: Any = importlib.import_module(first)
        for name in rest:
            found = getattr(found, name)
        found(*[one for name, one in value.items() if name != "_target_"])
    for one in value.values():
        _call_targets(one)
