"""What a run says of having been taken up again: where it goes on, and what is not as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from halfstep.train.journal import numbers
from halfstep.train.journal.journal import Event
from halfstep.train.journal.words import Item, clean

MOST_LINES = 20
"""Of one kind; a data set that was accepted as changed may have a line for each of its files."""
_PRECISION = "trained in "
"""How the line begins that tells of the precision which a new recipe came to."""


def resumed(start: Event) -> list[Item]:
    """The lines after the title; none of a run that is started for the first time."""
    said = start.get("resumed")
    if not said:
        return []
    lines = [_where(said, start)]
    if not said.get("exact", True):
        reasons = (
            said.get("because")
            or _accepted(said.get("changed") or (), start.get("recipe") or {})
            or ["it is not known to be exact"]
        )
        lines += _few("APPROXIMATE because ", reasons, alarm=True)
    lines += _few("accepted change: ", said.get("changed") or (), alarm=False)
    return lines + _few("passed over checkpoint ", said.get("passed_over") or (), alarm=True)


def goes_on(start: Event) -> bool:
    """Whether what a run is was said before: it goes on from a checkpoint, and its log was kept."""
    return bool((start.get("resumed") or {}).get("checkpoint"))


def _where(said: dict[str, Any], start: Event) -> Item:
    if not said.get("checkpoint"):
        return Item("started again from step 0: the run was ended before its first checkpoint")
    at, end = numbers.count(said["attempt"]), numbers.count(start["steps"])
    rest = f"from checkpoint {said['checkpoint']}{_again(said.get('repeated'))}"
    if said["attempt"] > start["steps"]:
        return Item(clean(f"resumed at step {at} {rest}: the run is already beyond its new end, step {end}"))
    return Item(clean(f"resumed at step {at} of {end} {rest}"))


def _accepted(changed: Iterable[Any], recipe: Mapping[str, Any]) -> list[str]:
    """Which of the two things that may be accepted as changed were."""
    of_recipe = {_is_setting(str(line), recipe) for line in changed}
    reasons = {True: "the recipe was changed", False: "the data was changed"}
    return [reason for is_recipe, reason in reasons.items() if is_recipe in of_recipe]


def _is_setting(line: str, recipe: Mapping[str, Any]) -> bool:
    """`train.steps: 9 -> 8` is one of the recipe, `train: 2 files renamed` is none: a section alone has no value."""
    section, dot, _ = line.partition(":")[0].partition(".")
    known = section in recipe and (bool(dot) or not isinstance(recipe[section], Mapping))
    return known or line.startswith(_PRECISION)


def _again(repeated: int | None) -> str:
    if not repeated:
        return ""
    return f" ({numbers.count(repeated)} steps are done again)" if repeated > 1 else " (1 step is done again)"


def _few(word: str, lines: Iterable[Any], alarm: bool) -> list[Item]:
    every = [Item(clean(f"{word}{line}"), alarm) for line in lines]
    more = len(every) - MOST_LINES
    return [*every[:MOST_LINES], Item(f"{word}{more} more, which are in the journal", alarm)] if more > 0 else every
