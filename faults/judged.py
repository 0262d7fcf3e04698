"""What a trial comes to: the first thing that does not hold."""

from __future__ import annotations

from collections.abc import Callable

from faults.outcome import Outcome
from halfstep.errors import HalfstepError

Check = tuple[str, Callable[[], bool]]


def first_wrong(*checks: Check) -> str | None:
    """The name of the first check that does not hold, and None where all of them do. Later ones are not tried."""
    for name, holds in checks:
        try:
            if not holds():
                return name
        except (AssertionError, HalfstepError, OSError, LookupError) as error:
            return f"{name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return None


def outcome(trials: dict[str, str | None], worst: str) -> Outcome:
    """Of what `first_wrong` said of each trial; where some went wrong, the first of them is the worst."""
    wrong = [f"{name}: {said}" for name, said in trials.items() if said is not None]
    return Outcome(len(trials) - len(wrong), len(trials), wrong[0] if wrong else worst)
