"""Results as plain data, made once, where they are printed or written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar


class JsonResult:
    """A base of results, which are dataclasses."""

    json_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of `as_dict`, as for `convert_to_json_data`; the fields if empty."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can represent."""
        return _collect_attributes(self)


def convert_to_json_data(value: object) -> Any:
    """Return objects, mappings, sequences, enums and paths as data that JSON can represent.

    An object with a method `as_dict` decides by itself. Another dataclass or named tuple becomes its fields; with a
    class attribute `json_keys` these attributes in this order, properties and attributes of attributes included:
    `"device.name"` becomes the key `name`, and `"gpu=device.name"` the key `gpu`.
    """
    if hasattr(value, "as_dict"):
        return convert_to_json_data(value.as_dict())
    if is_dataclass(value) or hasattr(value, "_fields"):
        return _collect_attributes(value)
    if isinstance(value, Mapping):
        return {key: convert_to_json_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json_data(inner) for inner in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _collect_attributes(value: Any) -> dict[str, Any]:
    paths = getattr(value, "json_keys", ()) or getattr(value, "_fields", ()) or [field.name for field in fields(value)]
    named = (path.partition("=") if "=" in path else (path.rpartition(".")[2], "", path) for path in paths)
    return {key: convert_to_json_data(attrgetter(path)(value)) for key, _, path in named}


def _to_plain(value: Any) -> Any:
    """Return a number or text for a value that JSON cannot represent, such as a path or a NumPy number."""
    try:
        return _replace_nonfinite(float(value))
    except (TypeError, ValueError, RuntimeError):
        return str(value)


_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_to_plain)


def convert_to_strict_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content as it is read back from a line: numbers that are not finite are words."""
    return dict(json.loads(format_json_line(dict(content))))


def format_json_line(content: Mapping[str, object]) -> str:
    """Return the content as one line of strict JSON; non-finite numbers become the words NaN, Infinity, -Infinity."""
    # Nearly all values are finite, and need no second pass.
    try:
        return _STRICT.encode(content) + "\n"
    except ValueError:
        return _STRICT.encode(_replace_nonfinite(content)) + "\n"


def _replace_nonfinite(value: Any) -> Any:
    """Return the value with words instead of non-finite numbers."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _replace_nonfinite(inner) for key, inner in value.items()}
    return [_replace_nonfinite(inner) for inner in value] if isinstance(value, list | tuple) else value
