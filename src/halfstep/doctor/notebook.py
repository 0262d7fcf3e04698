"""The code of a notebook, each line on the line that it has in the file. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from halfstep.doctor.code.script import parse_syntax_tree
from halfstep.doctor.located import split_lines


def extract_notebook_code(text: str) -> str | None:
    """Return the code cells of a notebook as one script; None if it has none, or lines cannot be found again.

    A finding in it has the line of the notebook's file.
    """
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        return None
    lines = [line.strip().removesuffix(",") for line in split_lines(text)]
    script = [""] * len(lines)
    at = 0
    for cell in _iterate_code_cells(notebook):
        places: list[int] = []
        for line in cell:
            written = (json.dumps(line, ensure_ascii=False), json.dumps(line))
            at = next((number for number in range(at, len(lines)) if lines[number] in written), -1)
            if at < 0:
                return None
            places.append(at)
            at += 1
        for place, line in zip(places, _strip_shell_lines(cell), strict=True):
            script[place] = line
    return "\n".join(script) + "\n" if any(script) else None


def _iterate_code_cells(notebook: Any) -> Iterator[list[str]]:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    for cell in cells if isinstance(cells, list) else ():
        source = cell.get("source") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None
        # A cell of another language, or of the shell.
        if isinstance(source, list) and source and not str(source[0]).startswith("%%"):
            yield [line for line in source if isinstance(line, str)]


def _strip_shell_lines(cell: list[str]) -> list[str]:
    """Return the lines of a cell, without those for IPython's shell; empty ones where the cell is no Python."""
    found, goes_on = [], False
    for line in cell:
        bare = line.rstrip("\r\n")
        is_shell = bare.lstrip().startswith(("!", "%"))
        # A command continues below its first line; `pass` stands for it where it may be alone in a block.
        found.append("" if goes_on else f"{bare[: len(bare) - len(bare.lstrip())]}pass" if is_shell else bare)
        goes_on = (goes_on or is_shell) and bare.endswith("\\")
    try:
        parse_syntax_tree("\n".join(found))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [""] * len(cell)
    return found
