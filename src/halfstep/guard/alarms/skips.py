"""Detect too many skipped steps, in a row or among the last hundred attempts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

LAST = 100
"""The attempts over which the share is taken; missing ones at the start count as good."""


class Skips:
    """A counter of skips that have no normal explanation."""

    def __init__(self, in_a_row: int, share: float) -> None:
        self._most_in_a_row, self._share = in_a_row, share
        self.in_a_row = 0
        self._skipped: deque[int] = deque()
        self._attempts = 0

    def applied(self) -> None:
        """Record an applied step."""
        self.in_a_row = 0
        self._attempts += 1

    def skipped(self) -> None:
        """Record a skipped step."""
        self.in_a_row += 1
        self._attempts += 1
        self._skipped.append(self._attempts)

    def refused(self) -> None:
        """Record a step that a user's own guard refused."""
        # Not counted in a row: such a guard may refuse for a while with good reason, but not forever.
        self._attempts += 1
        self._skipped.append(self._attempts)

    def excused(self) -> None:
        """Record a normal skip, such as that of a loss scale that adjusts."""
        self._attempts += 1

    @property
    def lately(self) -> int:
        """Return the number of skips among the last hundred attempts."""
        while self._skipped and self._skipped[0] <= self._attempts - LAST:
            self._skipped.popleft()
        return len(self._skipped)

    @property
    def next_is_too_much(self) -> bool:
        """Return whether one more skip would raise the alarm."""
        return self.in_a_row + 1 >= self._most_in_a_row or self.lately + 1 > self._share * LAST

    def alarm(self) -> str | None:
        """Return the alarm in words, or None."""
        if self.in_a_row >= self._most_in_a_row:
            return f"{self.in_a_row} steps in a row were skipped"
        if self.lately > self._share * LAST:
            return f"{self.lately} of the last {LAST} steps were skipped"
        return None

    def forgive(self) -> None:
        """Reset the counts after a remedy."""
        self.in_a_row = 0
        self._skipped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"in_a_row": self.in_a_row, "skipped": list(self._skipped), "attempts": self._attempts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self.in_a_row, self._attempts = int(state["in_a_row"]), int(state["attempts"])
        self._skipped = deque(int(attempt) for attempt in state["skipped"])
