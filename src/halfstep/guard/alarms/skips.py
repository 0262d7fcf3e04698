"""Too many skipped steps: one after another, or among the last hundred."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

LAST = 100
"""Attempts over which a share is taken; before there are as many, the missing ones count as good."""


class Skips:
    """Counts skips that nothing excuses."""

    def __init__(self, in_a_row: int, share: float) -> None:
        self._most_in_a_row, self._share = in_a_row, share
        self.in_a_row = 0
        self._skipped: deque[int] = deque()
        self._attempts = 0

    def applied(self) -> None:
        self.in_a_row = 0
        self._attempts += 1

    def skipped(self) -> None:
        self.in_a_row += 1
        self._attempts += 1
        self._skipped.append(self._attempts)

    def refused(self) -> None:
        """A person's own guard said no: that may be its business for a while, but not for ever."""
        self._attempts += 1
        self._skipped.append(self._attempts)

    def excused(self) -> None:
        """A skip that is part of the business, such as a loss scale on its way down."""
        self._attempts += 1

    @property
    def lately(self) -> int:
        """Among the last hundred attempts."""
        while self._skipped and self._skipped[0] <= self._attempts - LAST:
            self._skipped.popleft()
        return len(self._skipped)

    @property
    def next_is_too_much(self) -> bool:
        """Whether one more skip would raise the alarm."""
        return self.in_a_row + 1 >= self._most_in_a_row or self.lately + 1 > self._share * LAST

    def alarm(self) -> str | None:
        """In words, what is too much."""
        if self.in_a_row >= self._most_in_a_row:
            return f"{self.in_a_row} steps in a row were skipped"
        if self.lately > self._share * LAST:
            return f"{self.lately} of the last {LAST} steps were skipped"
        return None

    def forgive(self) -> None:
        """What was done about it deserves a fresh start."""
        self.in_a_row = 0
        self._skipped.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "skipped": list(self._skipped), "attempts": self._attempts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self._attempts = int(state["in_a_row"]), int(state["attempts"])
        self._skipped = deque(int(attempt) for attempt in state["skipped"])
