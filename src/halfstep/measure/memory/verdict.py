"""Summarize an estimate: whether it fits, what would make it fit, and why memory is not halved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.measure.memory.devices import HERE
from halfstep.measure.memory.ledger import way_in_words
from halfstep.measure.setting import size_in_words

_CPU_RULES = "by the CPU's rules"
"""Prefix of the note for a device whose own rules could not be followed."""
_HALF = 0.45
"""Savings above this share count as half."""


def verdict(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line for each device, the savings, and the setting to use on the first device."""
    lines = [_line(page) for page in report["devices"]]
    return {
        "lines": lines or ["nothing was estimated"],
        "savings": [row for page in report["devices"][:1] for row in savings(page["columns"])],
        "take": _take(report["devices"][0]) if lines else None,
    }


def main_column(page: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the column of the first line: the device's own precision at the first batch, run as the case is."""
    columns = page["columns"]
    if not columns:
        return None
    own = [column for column in columns if column["setting"]["precision"] == page["auto"]]
    first: Mapping[str, Any] = (own or columns[-1:])[0]
    return first


def place_in_words(device: Mapping[str, Any]) -> str:
    """Return the device's id, or "this machine"."""
    return "this machine" if device["id"] == HERE else str(device["id"])


def _line(page: Mapping[str, Any]) -> str:
    column = main_column(page)
    if column is None:
        return f"{place_in_words(page['device'])}: nothing was estimated"
    setting, device = column["setting"], page["device"]
    how = way_in_words(setting["precision"], setting["recompute"], column["samples"])
    word = "fits" if column["fits"] else "does not fit"
    if any(note.startswith(_CPU_RULES) for note in column["notes"]):
        word += f", {_CPU_RULES}"
    peak, memory = size_in_words(column["peak"]), size_in_words(device["memory"])
    return f"{word}: peak {peak} of {memory} on {place_in_words(device)} {how}{_farther(page, setting)}"


def _farther(page: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
    rows = {row["recompute"]: row for row in page["largest"] if row["precision"] == setting["precision"]}
    row = rows.get(setting["recompute"])
    if row is None:
        return ""
    if row["batch"]:
        return f"; {reach(row)}"
    fitting = [lever for lever in row["levers"] if lever["fits"]]
    short = f"; even {row['smallest']} is {size_in_words(row['missing'])} too much"
    return f"{short}, but {_way(fitting[0])} fits" if fitting else f"{short}, however it is run"


def reach(row: Mapping[str, Any]) -> str:
    """Return the largest batch as text, for a row where some batch fits."""
    if row["at_least"]:
        return f"no limit found up to batch {row['batch']}"
    return f"largest batch about {row['batch']}, which fits" if row["about"] else f"largest batch {row['batch']}"


def _way(lever: Mapping[str, Any]) -> str:
    return f"{lever['precision']}{' with recomputing' if lever['recompute'] else ''}"


def savings(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the savings of each column against fp32 with the same batch, and the reason where they are below half."""
    wide = {_kind(column): column for column in columns if column["setting"]["precision"] == "fp32"}
    rows = []
    for column in columns:
        base = wide.get(_kind(column))
        if base is not None and base is not column and base["peak"]:
            saved = 1 - column["peak"] / base["peak"]
            rows.append({**_column_named(column), "saved": round(saved, 4), "why": _why(column, base, saved)})
    return rows


def _kind(column: Mapping[str, Any]) -> tuple[int, bool]:
    return column["samples"], column["setting"]["recompute"]


def _column_named(column: Mapping[str, Any]) -> dict[str, Any]:
    setting = column["setting"]
    return {"precision": setting["precision"], "batch": column["samples"], "recompute": setting["recompute"]}


def _why(column: Mapping[str, Any], base: Mapping[str, Any], saved: float) -> str:
    """Return the notes of this column that fp32's does not have: what did not shrink."""
    return "" if saved >= _HALF else "; ".join(note for note in column["notes"] if note not in base["notes"])


def _take(page: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the setting to train with: as requested if it fits, else the largest batch of the first row that fits."""
    column = main_column(page)
    if column is None:
        return None
    if column["fits"]:
        return _column_named(column)
    own = [row for row in page["largest"] if row["precision"] == page["auto"]]
    for row in [*own, *page["largest"]]:
        if row["batch"]:
            batch = row["preferred"] or row["batch"]
            return {"precision": row["precision"], "batch": batch, "recompute": row["recompute"]}
    return None
