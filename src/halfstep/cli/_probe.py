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
    from halfstep.runs.liveness import RankWatch, RunLiveness

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
    from halfstep.status_line import clear_status_line

    try:
        found = judge_run(asked.run, asked.max_age, asked.rank, _WatchLine().show)
    finally:
        clear_status_line()
    if asked.json:
        ranks = [one._asdict() for one in found.ranks]
        content = {**found._asdict(), "run": str(found.run), "max_age": asked.max_age, "ranks": ranks}
        text = json.dumps(content, indent=1)
    else:
        text = _describe_status(found)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return found.code


class _WatchLine:
    """The line about ranks that are being watched: one in a log, on a terminal with the time left."""

    def __init__(self) -> None:
        self._is_first = True

    def show(self, watch: RankWatch) -> None:
        # On stderr: stdout has the answer alone, for programs that read it.
        from halfstep.status_line import show_on_terminal, show_status

        ranks = f"{watch.watched:,} ranks" if watch.watched > 1 else "1 rank"
        line = f"watching {ranks}: a heartbeat every {watch.heartbeat:.0f} s, at most {max(watch.left, 0):.0f} s left"
        (show_status if self._is_first else show_on_terminal)(line)
        self._is_first = False


def _describe_status(found: RunLiveness) -> str:
    code = f"exit code {found.code}"
    code = f" with {code}" if found.state == "ended" else f" ({code})" if found.code else ""
    why = f": {found.why}" if found.why not in ("", found.state) else ""
    again = "; the same command resumes" if found.restartable else ""
    line, columns = escape_to_one_line(f"{found.state}{code}{why}{again}"), get_terminal_size((0, 0)).columns
    # Programs that read a pipe get one line, unless COLUMNS is set.
    return fill(line, columns, subsequent_indent="  ", break_on_hyphens=False) if columns else line
