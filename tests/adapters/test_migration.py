"""Scripts of three libraries, unmodified and with halfstep: few lines change, and both train."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRARIES = ("lightning", "transformers", "accelerate")
MOST_CHANGED = 5


def changed_lines(library: str) -> tuple[int, int]:
    """The lines that are new in the second script and those that are gone, apart from indentation and empty lines."""
    texts = [(EXAMPLES / library / name).read_text() for name in ("before.py", "after.py")]
    before, after = ([line.strip() for line in text.splitlines() if line.strip()] for text in texts)
    diff = list(difflib.ndiff(before, after))
    return sum(line.startswith("+ ") for line in diff), sum(line.startswith("- ") for line in diff)


@pytest.mark.parametrize("library", LIBRARIES)
def test_few_lines_change(library: str) -> None:
    new, gone = changed_lines(library)
    assert 0 < new <= MOST_CHANGED, f"{library}: {new} new lines, {gone} gone"
    assert gone <= MOST_CHANGED


@pytest.mark.full
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_script_with_halfstep_trains(library: str) -> None:
    script = EXAMPLES / library / "after.py"
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "12"], check=True, capture_output=True, text=True, timeout=150
    )
    found = re.search(r"(accuracy|evaluation loss) (\d+\.\d+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    number = float(found[2])
    assert number > 0.5 if found[1] == "accuracy" else number < 3.4


if __name__ == "__main__":
    for one in LIBRARIES:
        print(f"{one}: %d lines new, %d gone" % changed_lines(one))
