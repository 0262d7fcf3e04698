"""One verdict for all processes."""

from __future__ import annotations

import json

from halfstep import world
from halfstep.guard.verdict import HARDWARE, Verdict


def agreed(verdict: Verdict) -> Verdict:
    """That of the first process that has a culprit, one in forward before one in backward; every process calls this."""
    verdicts = [Verdict.from_dict(json.loads(text)) for text in world.from_all(json.dumps(verdict.as_dict()))]
    return min(verdicts, key=_rank)


def _rank(verdict: Verdict) -> tuple[bool, bool, bool]:
    culprit = verdict.culprit
    return culprit is None, culprit is not None and culprit.backward, verdict.cause == HARDWARE
