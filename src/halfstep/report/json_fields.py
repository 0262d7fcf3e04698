"""Read fields of plain data that others may have written: of any type, or missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halfstep.printable import truncate_text

MISSING = math.nan
LARGEST = 1e300
"""Larger numbers count as missing: an axis multiplies and subtracts them, and must stay finite."""


def coerce_number(value: object) -> float:
    """Return a number that is neither infinite nor near it; NaN for anything else, such as a missing field."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return MISSING
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return MISSING
    return found if abs(found) < LARGEST else MISSING


def is_known_number(value: float) -> bool:
    """Return whether `coerce_number` found one."""
    return not math.isnan(value)


def coerce_mapping(value: object) -> dict[str, Any]:
    """Return a mapping with names as text; an empty one for anything else."""
    return {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else {}


def coerce_rows(value: object) -> list[dict[str, Any]]:
    """Return the mappings of a list; an empty list for anything else."""
    return [coerce_mapping(row) for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def coerce_text(value: object, longest: int = 2000) -> str:
    """Return a value as text of bounded length; empty for None."""
    return truncate_text("" if value is None else str(value), longest)


def coerce_texts(value: object) -> list[str]:
    """Return the items of a list as text; an empty list for anything else."""
    return [coerce_text(item) for item in value] if isinstance(value, list) else []


def format_typed_setting(value: object) -> str:
    """Return a setting as a person would type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_typed_setting, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else coerce_text(value, 300)
