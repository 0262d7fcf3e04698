"""What the processes learn about samples: which were replaced, and which made a step fail. Shared, then told once."""

from __future__ import annotations

import json
from collections.abc import Sequence

from halfstep import world
from halfstep.train.data.budget import Budget
from halfstep.train.data.quarantine import nonfinite_ids
from halfstep.train.data.source import Batch, Replaced
from halfstep.train.journal import journal as events
from halfstep.train.journal.journal import Journal


class News:
    """Gathers replaced samples; over the budget, every process stops at the same step."""

    def __init__(self, journal: Journal, limit: int) -> None:
        self._journal, self.budget = journal, Budget(limit)
        self._fresh: list[Replaced] = []

    def hear(self, replaced: Sequence[Replaced]) -> None:
        self._fresh += replaced
        if self._fresh and world.size() == 1:
            self.share()

    def share(self) -> None:
        """Every process hears of every replaced sample. Called by all of them at the same step."""
        told = world.from_all(json.dumps(self._fresh))
        self._fresh = []
        for replaced in (Replaced(*row) for rank in told for row in json.loads(rank)):
            self._journal.tell(events.REPLACED, **replaced._asdict())
            self.budget.spend([replaced])

    def suspects(self, window: Sequence[Batch]) -> tuple[list[int], list[int]]:
        """The samples of a failed step over all processes, and those of them that are not finite themselves."""
        ids = [number for batch in window for number in batch.ids]
        guilty = [number for batch in window for number in nonfinite_ids(batch)]
        told = [json.loads(rank) for rank in world.from_all(json.dumps([ids, guilty]))]
        return sorted({n for one in told for n in one[0]}), sorted({n for one in told for n in one[1]})
