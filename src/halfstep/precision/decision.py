"""A decision about precision as plain data, so that rank 0 can make it for all."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from halfstep import world
from halfstep.errors import HalfstepError, PrecisionRefused
from halfstep.finding import Finding


class Rung(NamedTuple):
    """One step of the ladder: a precision, whether it was taken, and why or why not."""

    name: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """The rungs that were tried, and what a person should know about the one taken."""

    rungs: tuple[Rung, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        return next(rung.name for rung in self.rungs if rung.accepted)

    def as_text(self) -> str:
        return json.dumps({"rungs": self.rungs, "findings": [finding.as_dict() for finding in self.findings]})


def decided_by_rank_zero(decide: Callable[[], Decision]) -> Decision:
    """Rank 0's decision on every rank. A refusal travels too, so that no rank waits for one that never comes."""
    if world.size() == 1:
        return decide()
    heard = json.loads(world.from_rank_zero(_as_text(decide) if world.rank() == 0 else ""))
    if "given" in heard:
        raise PrecisionRefused(heard["given"], allowed=heard["allowed"], do=heard["do"])
    rungs = tuple(Rung(*rung) for rung in heard["rungs"])
    return Decision(rungs, tuple(Finding(**finding) for finding in heard["findings"]))


def _as_text(decide: Callable[[], Decision]) -> str:
    try:
        return decide().as_text()
    except HalfstepError as error:
        return json.dumps({"given": error.given, "allowed": error.allowed, "do": error.do})
    except Exception as error:
        logging.getLogger("halfstep").exception("rank 0 could not choose a precision")
        return json.dumps({"given": f"rank 0 could not choose: {error!r}", "allowed": "", "do": "see rank 0's log"})
