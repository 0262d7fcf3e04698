"""What a run says of having been taken up again: where it goes on, and what is not as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfstep.train.journal import numbers
from halfstep.train.journal.journal import Event
from halfstep.train.journal.words import Item, clean

MOST_LINES = 20
"""Of one kind; a data set that was accepted as changed may have a line for each of its files."""


def resumed(start: Event) -> list[Item]:
    """The lines after the title; none of a run that is started for the first time."""
    said = start.get("resumed")
    if not said:
        return []
    lines = [_where(said, start)]
    if not said.get("exact", True):
        reasons = said.get("because") or ["it is not known to be exact"]
        lines += _few("APPROXIMATE because ", reasons, alarm=True)
    lines += _few("accepted change: ", said.get("changed") or (), alarm=False)
    return lines + _few("passed over checkpoint ", said.get("passed_over") or (), alarm=True)


def goes_on(start: Event) -> bool:
    """Whether what a run is was said before: it goes on from a checkpoint, and its log was kept."""
    return bool((start.get("resumed") or {}).get("checkpoint"))


def _where(said: dict[str, Any], start: Event) -> Item:
    if not said.get("checkpoint"):
        return Item("started again from step 0: the run was ended before its first checkpoint")
    place = f"step {numbers.count(said['attempt'])} of {numbers.count(start['steps'])}"
    return Item(clean(f"resumed at {place} from checkpoint {said['checkpoint']}{_again(said.get('repeated'))}"))


def _again(repeated: int | None) -> str:
    if not repeated:
        return ""
    return f" ({numbers.count(repeated)} steps are done again)" if repeated > 1 else " (1 step is done again)"


def _few(word: str, lines: Iterable[Any], alarm: bool) -> list[Item]:
    every = [Item(clean(f"{word}{line}"), alarm) for line in lines]
    more = len(every) - MOST_LINES
    return [*every[:MOST_LINES], Item(f"{word}{more} more, which are in the journal", alarm)] if more > 0 else every
