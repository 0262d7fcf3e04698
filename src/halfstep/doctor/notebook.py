"""The code of a notebook, each line on the line that it has in the file. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from halfstep.doctor.located import lines_of


def code_of(text: str) -> str | None:
    """Return the code cells of a notebook as one script; None where it has none, or lines cannot be found again.

    A finding in it has the line of the notebook's file.
    """
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        return None
    lines = [line.strip().removesuffix(",") for line in lines_of(text)]
    script = [""] * len(lines)
    at = 0
    for line in _code_lines(notebook):
        written = (json.dumps(line, ensure_ascii=False), json.dumps(line))
        at = next((number for number in range(at, len(lines)) if lines[number] in written), -1)
        if at < 0:
            return None
        script[at] = line.rstrip("\r\n")
        at += 1
    return "\n".join(script) + "\n" if any(script) else None


def _code_lines(notebook: Any) -> Iterator[str]:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    for cell in cells if isinstance(cells, list) else ():
        source = cell.get("source") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None
        # A cell of another language, or of the shell.
        if isinstance(source, list) and source and not str(source[0]).startswith("%%"):
            yield from (line for line in source if isinstance(line, str))
