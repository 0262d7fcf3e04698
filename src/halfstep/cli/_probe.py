"""Answer `halfstep status` without typer and rich, which take longer to import than a probe takes to answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from halfstep.printable import escape_to_one_line

if TYPE_CHECKING:
    from halfstep.runs.liveness import RunLiveness

COMMAND = "status"
MAX_AGE, LEAST_AGE, LARGEST_AGE, LARGEST_RANK = 60, 1, 10**6, 99_999
_NUMBERS = {"--max-age": (LEAST_AGE, LARGEST_AGE), "--rank": (0, LARGEST_RANK)}


class StatusQuery(NamedTuple):
    """What a command line of `halfstep status` asks for."""

    run: Path
    max_age: int = MAX_AGE
    rank: int | None = None
    json: bool = False


def parse_status_query(words: list[str]) -> StatusQuery | None:
    """Return what a usual command line asks for; None for any other, which typer reads or refuses."""
    folders, numbers, as_json = [], {}, False
    given = iter(words)
    for word in given:
        name, _, value = word.partition("=")
        if name in _NUMBERS:
            value = value or next(given, "")
            least, largest = _NUMBERS[name]
            # Not `isdigit`, which accepts digits that `int` refuses.
            if not (value.isdecimal() and len(value) < 10 and least <= int(value) <= largest):
                return None
            numbers[name] = int(value)
        elif word == "--json":
            as_json = True
        elif word.startswith("-"):
            return None
        else:
            folders.append(word)
    if len(folders) != 1 or not folders[0]:
        return None
    return StatusQuery(Path(folders[0]), numbers.get("--max-age", MAX_AGE), numbers.get("--rank"), as_json)


def answer(asked: StatusQuery) -> int:
    """Print the state of a run, and return the exit code; raise BadData for a folder without a run."""
    from halfstep.runs.liveness import judge_run

    found = judge_run(asked.run, asked.max_age, asked.rank)
    if asked.json:
        ranks = [one._asdict() for one in found.ranks]
        content = {**found._asdict(), "run": str(found.run), "max_age": asked.max_age, "ranks": ranks}
        text = json.dumps(content, indent=1)
    else:
        text = _describe_status(found)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return found.code


def _describe_status(found: RunLiveness) -> str:
    code = f"exit code {found.code}"
    code = f" with {code}" if found.state == "ended" else f" ({code})" if found.code else ""
    why = f": {found.why}" if found.why not in ("", found.state) else ""
    again = "; the same command resumes" if found.restartable else ""
    line, columns = escape_to_one_line(f"{found.state}{code}{why}{again}"), get_terminal_size((0, 0)).columns
    # Programs that read a pipe get one line, unless COLUMNS is set.
    return fill(line, columns, subsequent_indent="  ", break_on_hyphens=False) if columns else line
