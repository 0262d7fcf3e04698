"""Replace the text of errors and findings by their id, in each process that has this folder on its PYTHONPATH.

Python imports a module of this name when it starts. `scripts/test --without-words` puts the folder on the path.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _replace_in_errors(module: ModuleType) -> None:
    base = module.HalfstepError
    make = base.__init__

    def without_words(self: Any, given: str, *, allowed: str = "", do: str = "", id: str = "", **facts: Any) -> None:
        make(self, id or type(self).id, id=id, **facts)

    base.__init__ = without_words


def _replace_in_findings(module: ModuleType) -> None:
    base = module.Finding
    make = base.__init__

    def without_words(self: Any) -> None:
        object.__setattr__(self, "evidence", self.id)
        object.__setattr__(self, "fix", self.id)

    def made(self: Any, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        without_words(self)

    base.__init__ = made
    base.__post_init__ = without_words  # which dataclasses that derive from it call


_REPLACED = {"halfstep.errors": _replace_in_errors, "halfstep.finding": _replace_in_findings}


class _Finder(MetaPathFinder, Loader):
    """Executes the two modules as usual, and then replaces what they define."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _REPLACED or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        self._loaders = {**getattr(self, "_loaders", {}), name: spec.loader}
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        loader = self._loaders[module.__name__]
        assert loader is not None
        loader.exec_module(module)
        _REPLACED[module.__name__](module)


sys.meta_path.insert(0, _Finder())
