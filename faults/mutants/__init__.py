"""Known defects of training systems, put into halfstep one at a time: a row that none of them can fail is no evidence.

Each file here is a defect that a trusted system had: `WHAT`, `ROWS` that must go red, and `apply`, which breaks this
process for good. Processes that a row starts are told by name, and break themselves.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Any

VARIABLE = "HALFSTEP_FAULTS_MUTANT"


def mutants() -> dict[str, Any]:
    """Every defect by its name: the files `mNN_*.py` of this folder, and the `MUTANTS` of a file with several."""
    found: dict[str, Any] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        found |= getattr(module, "MUTANTS", {name.split("_")[0].upper(): module})
    return found


def current() -> str | None:
    """The defect that this process was started to have."""
    return os.environ.get(VARIABLE)


def apply(name: str | None) -> None:
    """Put a defect into this process; raise LookupError if it replaces a name that halfstep no longer has."""
    if name is None:
        return
    mutant, before = mutants()[name], _names()
    mutant.apply()
    for owner, names in _names().items():
        if added := names - before.get(owner, names):
            raise LookupError(f"{name} sets {', '.join(sorted(added))} of {owner}, which does not exist")


def _names() -> dict[str, set[str]]:
    """The names in each loaded module of halfstep and in each of its classes, with those that `__init__` sets."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "halfstep"}
    found = {name: set(vars(module)) for name, module in modules.items()}
    for name, module in modules.items():
        for kind in [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]:
            begin = getattr(kind.__init__, "__code__", None)
            found[f"{name}.{kind.__qualname__}"] = {*dir(kind), *(begin.co_names if begin else ())}
    return found
