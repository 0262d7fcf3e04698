"""What a trial comes to: the first thing that does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass
class Compared:
    """How many comparisons to the bit were made, and how many of them found other bits."""

    n: int = 0
    other: int = 0

    def counted(self, same: bool) -> bool:
        """What a comparison found, once it is counted."""
        self.n, self.other = self.n + 1, self.other + (not same)
        return same

    def __str__(self) -> str:
        return f"other bits in {self.other} of {self.n} comparisons"


def steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def held(trials: dict[str, str | None]) -> int:
    """How many trials had nothing wrong."""
    return sum(said is None for said in trials.values())


def outcome(trials: dict[str, str | None], worst: str) -> Outcome:
    """Of what `first_wrong` said of each trial; where some went wrong, the first of them is the worst."""
    wrong = [f"{name}: {said}" for name, said in trials.items() if said is not None]
    return Outcome(held(trials), len(trials), wrong[0] if wrong else worst)
