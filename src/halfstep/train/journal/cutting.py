"""How long a run's journal and log are, as a checkpoint has it, and cutting them back to that for a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from halfstep.errors import StateMismatch
from halfstep.train.journal.opening import to_write

JOURNAL, LOG = "journal.jsonl", "train.log"

_BLOCK = 2**16


def sizes(folder: Path) -> dict[str, int]:
    """The bytes of both files now; 0 for one that is not there."""
    paths = {name: folder / name for name in (JOURNAL, LOG)}
    return {name: path.stat().st_size if path.is_file() else 0 for name, path in paths.items()}


def cut_back(folder: Path, sizes: Mapping[str, int]) -> None:
    """Shorten both files to what they were, at the end of a line. One without a size was not there, and is emptied.

    A file that is shorter already, as after a loss of power, only loses a last line that was cut off.
    """
    _refuse_others(sizes)
    for name in (JOURNAL, LOG):
        cut_to_lines(folder / name, sizes.get(name, 0))


def cut_to_lines(path: Path, at_most: int | None = None) -> None:
    """Cut a file after its last whole line, of its first `at_most` bytes where these are given."""
    if not path.is_file():
        return
    with to_write(path), path.open("r+b") as file:
        end = file.seek(0, 2)
        kept = last_line_end(file, end if at_most is None else min(at_most, end))
        if kept < end:
            file.truncate(kept)


def last_line_end(file: BinaryIO, before: int) -> int:
    """Where the last line of a file's first bytes ends, however long the lines are; 0 where none does."""
    while before > 0:
        begin = max(0, before - _BLOCK)
        file.seek(begin)
        found = file.read(before - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        before = begin
    return 0


def _refuse_others(sizes: Mapping[str, int]) -> None:
    """Sizes come from a file: a name that is not one of ours could be any file's."""
    for name, size in sizes.items():
        # A truth value is a whole number to Python, and the size of no file.
        if name not in (JOURNAL, LOG) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise StateMismatch(
                f"a saved size of {name!r}: {size!r}",
                allowed=f"whole numbers from 0 for {JOURNAL} and {LOG}",
                do="take another checkpoint: this one was not written by halfstep, or was changed",
            )
