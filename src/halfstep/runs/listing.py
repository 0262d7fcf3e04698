"""List the runs of a folder from their small files and the ends of their journals. Imports no torch."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from halfstep import status_files
from halfstep.errors import GAVE_UP, INTERRUPTED, TRY_AGAIN, BadData
from halfstep.files import LARGEST_JSON, read_json
from halfstep.journal.events import END, EPOCH, START, STEP, Event
from halfstep.journal.jsonl import JOURNAL, iterate_lines_backwards, list_journal_parts, parse_event
from halfstep.journal.thinning import parse_journal_number
from halfstep.runs.listing_page import Listing, RunRow
from halfstep.status_files import RankStatusRecord, name_status_file, parse_timestamp, read_status

RECIPE, RESULT, STATUS = "recipe.yaml", "result.json", name_status_file(0)
"""Files of a run; their modules load the schema of recipes or torch."""
MOST_ENTRIES = 100_000
"""Entries of a folder that are looked at."""
LARGEST_TAIL = 4 * 2**20
"""Bytes of the end of a journal that are searched for the last step and the last epoch."""
SILENT_AFTER = 60.0
"""Seconds without a heartbeat, which comes every 5 of them, after which a run of another host is not called running."""
LONGEST = 200

RUNNING, FINISHED, STOPPED, GIVEN_UP = "running", "finished", "stopped", "gave up"
FAILED, KILLED, SILENT, NOT_BEGUN = "failed", "killed", "silent", "not begun"
_BY_CODE = {0: FINISHED, TRY_AGAIN: STOPPED, INTERRUPTED: STOPPED, GAVE_UP: GIVEN_UP}
_BY_REASON = {"finished": FINISHED, "early_stopping": FINISHED, "stopped": STOPPED, "interrupted": STOPPED}
_BY_REASON |= {"gave_up": GIVEN_UP}
_KINDS = (START, STEP, EPOCH, END)
_OWN_BEGIN = b'{"event":"'
"""The start of a line written by halfstep; another program may have rewritten the fields in any order."""


class RunState(NamedTuple):
    """The state of a run in one word, and why."""

    word: str
    why: str


def runs(folder: str | os.PathLike[str] = "runs", most: int = 50) -> Listing:
    """List the runs of a folder with their state, the newest first.

    Args:
        folder: A folder of runs, or one run.
        most: The maximum number of runs to list.

    Returns:
        A row for each run, and the number of runs left out.

    Raises:
        BadData: The folder cannot be read.
    """
    folder = Path(folder)
    try:
        places = [folder] if is_run(folder) else _list_folders(folder)
    except OSError as error:
        raise BadData(
            f"cannot list the folder {folder}: {error.strerror or error}",
            allowed="a folder of runs",
            do="give the folder that contains them, such as the parent of run.dir",
        ) from None
    found = sorted(((_find_last_write_time(place), place) for place in places if is_run(place)), reverse=True)
    rows = [_read_run_row(place, at) for at, place in found[:most]]
    return Listing(folder, rows, len(found) - len(rows), len(places) - len(found))


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: a recipe, and something that a run writes."""
    return _is_file(folder / RECIPE) and any(_is_file(folder / name) for name in (JOURNAL, STATUS, RESULT, "train.log"))


def _is_file(path: Path) -> bool:
    # Not a link: what it points to is not of this run.
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _list_folders(folder: Path) -> list[Path]:
    found = []
    with os.scandir(folder) as entries:
        for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                found.append(folder / entry.name)
    return found


def _find_last_write_time(run: Path) -> float:
    """Return when a run wrote last."""
    times = [0.0]
    for name in (JOURNAL, STATUS, RESULT, RECIPE):
        try:
            times.append((run / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def _read_run_row(run: Path, written_at: float) -> RunRow:
    result, last = _parse_fields(read_json(run / RESULT)), _read_last_events(run / JOURNAL)
    state = read_run_state(run, last.get(END, {}))
    start, step = last.get(START, {}), last.get(STEP, {})
    best = _parse_fields((result or last.get(EPOCH, {})).get("best"))
    value = parse_journal_number(best.get("value"))
    seconds = max((parse_journal_number(event.get("time")) for event in last.values()), default=0.0)
    return RunRow(
        name=run.name or str(run),
        state=state.word,
        why=state.why,
        precision=_parse_word(result.get("precision"))
        or _parse_word(_parse_fields(start.get("precision")).get("chosen")),
        metric=_parse_word(best.get("metric")) or _parse_word(_parse_fields(start.get("metric")).get("name")),
        value=value if abs(value) < float("inf") else None,
        steps=_parse_count(step.get("attempt")),
        planned=_parse_count(start.get("steps")),
        skips=_count_skipped_steps(step, result),
        seconds=seconds if 0.0 < seconds < float("inf") else None,
        age=max(0.0, time.time() - written_at),
    )


def read_run_state(run: Path, end: Event) -> RunState:
    """Return the state of a run from its result, its status and the end in its journal, if its last launch has one."""
    status = read_status(run, 0) or RankStatusRecord()
    if status.state == status_files.RUNNING:
        return _infer_run_state(status)
    why = _parse_word(status.reason) or _parse_word(end.get("error")) or ""
    if status.code is not None:
        return RunState(_BY_CODE.get(status.code, FAILED), why)
    if end or read_json(run / RESULT) is not None:
        return RunState(_BY_REASON.get(str(end.get("reason", "finished")), FAILED), why)
    begun = _is_file(run / JOURNAL)
    return RunState(KILLED, "it ended without writing a result") if begun else RunState(NOT_BEGUN, "")


def _infer_run_state(status: RankStatusRecord) -> RunState:
    """Return the state of a run that wrote no end."""
    running = RunState(RUNNING, _parse_word(status.phase) or "")
    if status.is_of_this_host and status.pid is not None:
        gone = RunState(KILLED, "its process is gone and wrote no result")
        return gone if status.is_gone(parse_timestamp(status.since)) else running
    if time.time() - status.written_at < SILENT_AFTER:
        return running
    return RunState(SILENT, f"no heartbeat from {_parse_word(status.host) or 'its host'}")


def _read_last_events(path: Path) -> dict[str, Event]:
    """Return the last start, step, epoch and end of a journal, as far as its end and its first line have them."""
    found: dict[str, Event] = {}
    try:
        left = LARGEST_TAIL
        for line in iterate_lines_backwards(path):
            left -= len(line) + 1
            kind = _parse_event_kind(line)
            if kind in _KINDS and kind not in found and (event := parse_event(line)):
                found[kind] = event
            if START in found or left < 0:
                break
        return found if START in found else found | _read_first_start(path)
    except (OSError, ValueError):
        return found


def _parse_event_kind(line: bytes) -> str:
    """Return the kind of a line's event, from its first bytes where halfstep wrote it: most lines are not read."""
    if line.startswith(_OWN_BEGIN):
        return line[len(_OWN_BEGIN) : line.find(b'"', len(_OWN_BEGIN))].decode(errors="replace")
    event = parse_event(line)
    return "" if event is None else str(event["event"])


def _read_first_start(path: Path) -> dict[str, Event]:
    with list_journal_parts(path)[0].path.open("rb") as file:
        event = parse_event(file.readline(LARGEST_JSON))
    return {START: event} if event is not None and event["event"] == START else {}


def _count_skipped_steps(step: Event, result: Mapping[str, object]) -> int | None:
    attempt, applied = _parse_count(step.get("attempt")), _parse_count(step.get("step"))
    if attempt is not None and applied is not None:
        return max(0, attempt - applied)
    counts = [_parse_count(count) for count in _parse_fields(result.get("skipped")).values()]
    return sum(count for count in counts if count) if result else None


def _parse_fields(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _parse_word(value: object) -> str | None:
    return value[:LONGEST] if isinstance(value, str) and value else None


def _parse_count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None
