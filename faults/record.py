"""docs/faults.json: what the matrix printed in full, row by row, with the command that made it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfstep.files import read_json, write_json

RECORD = Path(__file__).parents[1] / "docs" / "faults.json"
COMMANDS = {"rows": "scripts/faults --full --record", "mutants": "scripts/faults --mutants --record"}
KEYS = {"rows": "id", "mutants": "mutant"}


def record(section: str, found: Iterable[dict[str, Any]]) -> None:
    """Put results into their places; those of rows that were not run stay."""
    kept = read_json(RECORD) or {}
    key = KEYS[section]
    entries = {entry[key]: entry for entry in (*kept.get(section, ()), *found)}
    write_json(RECORD, {**kept, "commands": COMMANDS, section: [entries[name] for name in sorted(entries)]})
