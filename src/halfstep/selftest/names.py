"""The names of the parts, in the order in which they run, and of their results. Imports no torch."""

from __future__ import annotations

import ast
from pathlib import Path

PARTS = (
    "transaction",
    "scale",
    "observed",
    "probe",
    "memory",
    "overhead",
    "replay",
    "parity",
    "plan",
    "resume",
    "ranks",
)
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
FORM = 1
"""The form of the JSON."""


def description(name: str) -> str:
    """Return what a part checks, in one line: `WHAT` of its file, read without loading torch."""
    tree = ast.parse((Path(__file__).parent / "parts" / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "WHAT":
            return str(ast.literal_eval(node.value))
    raise LookupError(f"{name} has no WHAT")
