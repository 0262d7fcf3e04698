"""Make JSON of results, once, where they are printed or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar


class Jsonable:
    """A dataclass that decides on its JSON: the attributes in `json_keys`, which may be properties; else its fields."""

    json_keys: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        return {key: to_json(getattr(self, key)) for key in self.json_keys or _field_names(self)}


def to_json(value: object) -> Any:
    """Return plain data: objects by their `as_dict` or their fields, tuples as lists, paths as text."""
    if hasattr(value, "as_dict"):
        return to_json(value.as_dict())
    if is_dataclass(value):
        return {key: to_json(getattr(value, key)) for key in _field_names(value)}
    if isinstance(value, Mapping):
        return {key: to_json(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_json(value._asdict())
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _field_names(value: Any) -> list[str]:
    return [field.name for field in fields(value)]
