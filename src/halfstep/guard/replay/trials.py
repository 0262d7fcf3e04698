"""Reruns that every process makes together, and whose outcome every process knows: so that all of them decide alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from halfstep import world
from halfstep.guard.replay.deed import deed_of, limit_of, needs_other_code
from halfstep.guard.replay.rerun import Rerun, Way, batch_kept, rerun
from halfstep.guard.verdict import Culprit
from halfstep.observe.origins import CONSTANT, OTHERS, Made
from halfstep.step.attempt import Attempt

COUNTS_NOTHING = "counts no element: its (sum, count) has a count of 0"


@dataclass(frozen=True)
class Outcome:
    """What came of one rerun, over all processes."""

    finite: bool
    loss: float
    grad_norm: float
    culprit: Culprit | None = None
    deed: str = ""
    """What the culprit did, in words."""
    senseless: bool = False
    """What it was asked for has no answer in any format, such as a division by zero."""
    bad_parameters: tuple[str, ...] = ()
    error: str = ""
    """Why it could not be run, as where memory does not suffice."""
    rank: int = 0
    """Whose culprit it is."""
    weight: float = 1.0
    """Of the loss, beside those of other processes."""


class Trials:
    """The same step, tried in several ways. `written`: it writes into its batch, which is kept as it is now."""

    def __init__(self, model: nn.Module, attempt: Attempt, *, written: bool = False) -> None:
        self.model, self.attempt, self.written = model, attempt, written

    def run(self, way: Way, attempt: Attempt | None = None) -> Outcome:
        mine = self._tried(way, attempt or self.attempt)
        return _together([_read(json.loads(text)) for text in world.from_all(json.dumps(asdict(mine)))])

    def _tried(self, way: Way, attempt: Attempt) -> Outcome:
        try:
            with batch_kept(attempt.microbatches if self.written else ()):
                ran = rerun(self.model, attempt, way)
        except Exception as error:  # fp32 may not have the memory, and a loss function may not like to be called twice
            said = str(error).partition("\n")[0]
            return _failed(f"{type(error).__name__}: {said}" if said else type(error).__name__)
        return _plain(ran)


def culprit_of(made: Made) -> Culprit:
    return Culprit(
        made.name,
        made.module,
        made.backward,
        made.line,
        made.format,
        tuple(sorted(made.kinds)),
        max((given.largest for given in made.given), default=0.0),
        made.in_fp32,
        limit_of(made.format),
        made.outside,
    )


def _plain(ran: Rerun) -> Outcome:
    found = Outcome(
        ran.finite, ran.loss, ran.grad_norm, bad_parameters=ran.bad_parameters, rank=world.rank(), weight=ran.weight
    )
    if ran.origin is None:
        return found
    return replace(
        found, culprit=culprit_of(ran.origin), deed=deed_of(ran.origin), senseless=needs_other_code(ran.origin)
    )


def _failed(why: str) -> Outcome:
    return Outcome(False, math.nan, math.nan, error=why, rank=world.rank())


def _read(plain: Mapping[str, Any]) -> Outcome:
    culprit = plain["culprit"]
    return Outcome(
        **{
            **plain,
            "culprit": None if culprit is None else Culprit(**{**culprit, "kinds": tuple(culprit["kinds"])}),
            "bad_parameters": tuple(plain["bad_parameters"]),
        }
    )


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    """The first process with a culprit speaks, a culprit in forward before one in backward."""
    bad = [outcome for outcome in outcomes if not outcome.finite] or outcomes
    weight = sum(outcome.weight for outcome in outcomes)
    found = replace(
        min(bad, key=_least_told),
        loss=sum(outcome.loss * outcome.weight for outcome in outcomes if outcome.weight) / (weight or math.nan),
        grad_norm=max(outcome.grad_norm for outcome in outcomes),
        error=next((outcome.error for outcome in outcomes if outcome.error), ""),
        weight=weight,
    )
    if weight or found.culprit is not None:
        return found
    return replace(found, finite=False, deed=COUNTS_NOTHING, senseless=True)


def _least_told(outcome: Outcome) -> tuple[bool, bool, bool]:
    """Those who got their gradients from another process know less than that one."""
    culprit = outcome.culprit
    received = culprit is not None and culprit.outside in (CONSTANT, OTHERS)
    return culprit is None, received, culprit is not None and culprit.backward
