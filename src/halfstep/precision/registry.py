"""From a precision's name to the precision: each is a file in `kinds/`."""

from __future__ import annotations

import importlib

from halfstep.errors import unknown_name
from halfstep.precision import kinds
from halfstep.precision.names import precision_names
from halfstep.precision.precision import Precision


def precision_named(name: str) -> Precision:
    """The precision of exactly this name; `names.read_precision` understands the aliases."""
    if name not in precision_names():
        raise unknown_name("precision", name, precision_names())
    module = importlib.import_module(f"{kinds.__name__}.{name.replace('-', '_')}")
    found: Precision = module.PRECISION
    return found
