"""The precisions there are: one file each in `kinds/`, found by listing the folder."""

from __future__ import annotations

import importlib
import pkgutil

from halfstep.errors import unknown_name
from halfstep.precision import kinds
from halfstep.precision.precision import Precision


def precision_names() -> list[str]:
    return [info.name.replace("_", "-") for info in pkgutil.iter_modules(kinds.__path__)]


def precision_named(name: str) -> Precision:
    """The precision of exactly this name; `names.read_precision` understands the aliases."""
    if name not in precision_names():
        raise unknown_name("precision", name, precision_names())
    module = importlib.import_module(f"{kinds.__name__}.{name.replace('-', '_')}")
    found: Precision = module.PRECISION
    return found
