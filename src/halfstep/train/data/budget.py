"""How many samples may be bad before a run is no longer the run that was asked for."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.errors import BadData
from halfstep.train.data.samples import QUARANTINED
from halfstep.train.data.source import Replaced


class Budget:
    """Counts distinct bad samples by name; a sample that is met again in a later epoch costs nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bad: set[str] = set()

    def spend(self, replaced: Iterable[Replaced]) -> None:
        """BadData at the first sample beyond the limit. Quarantined samples were read well, and are not counted."""
        for one in replaced:
            if one.reason == QUARANTINED:
                continue
            self.bad.add(one.name)
            if len(self.bad) > self.limit:
                raise BadData(
                    f"{len(self.bad)} samples cannot be read, the last of them {one.name}: {one.reason}",
                    allowed=f"data.bad_samples={self.limit}",
                    do="mend or remove the files that the journal names, or raise data.bad_samples",
                )
