"""Python that a command printed, taken from the screen as a person would select it with the mouse."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.journeys.terminal import surroundings

WITHOUT_HALFSTEP = """
import sys
sys.modules["halfstep"] = None  # an import of it, or of anything in it, now fails as where it is not installed
"""


def printed_python(screen: str) -> str:
    """The lines from the first import on, as far as they are Python."""
    lines = screen.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"\s*(import|from) \w", line))
    blocks = (textwrap.dedent("\n".join(lines[first:last])) for last in range(len(lines), first, -1))
    return next(block for block in blocks if is_python(block)).strip()


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def run_outside(code: str, folder: Path) -> str:
    """Runs code in a process that cannot import halfstep, and returns what it printed."""
    return run_python(WITHOUT_HALFSTEP + code, folder)


def run_python(code: str, folder: Path) -> str:
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=folder, env=surroundings(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stderr[-2000:]}\nof:\n{code}"
    return done.stdout
