"""Count the skipped steps of a run: the limits, the streak of each optimizer, and the alarms for too many."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from halfstep.errors import WrongUse, build_unknown_name_error
from halfstep.formats import FP32
from halfstep.guard.verdict import CODE, DATA, DIVERGENCE, NOT_REPRODUCIBLE, PRECISION, STATE, WARM_UP, Verdict
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, StepReport

Spikes = Literal["off", "warn", "refuse"]


@dataclass(frozen=True)
class Limits:
    """The limits of a Guardian; raises WrongUse for a number that is not allowed."""

    skips_in_a_row: int = 5
    """The maximum number of skips in a row, without those of a loss scale that adjusts."""
    skip_share: float = 0.25
    """The maximum share of skips among the last hundred attempts."""
    rollbacks: int = 2
    """The maximum number of rollbacks in a run."""
    probation: int = 1000
    """The applied steps without a failure after which the newest remedy is lifted."""
    keep_every: int = 100
    """The applied steps between two copies of the run in memory, if a rollback may be needed."""
    diagnoses: int = 20
    """The maximum number of diagnoses in a run; each repeats the step several times and inspects every operation."""
    islands: int = 8
    """The number of modules that may become islands before the whole run changes its precision."""
    spikes: Spikes = "warn"
    """The reaction to a finite loss far above the usual: nothing, a warning, or refusing the update."""

    def __post_init__(self) -> None:
        _check_spikes(self.spikes)
        numbers = {name: number for name, number in vars(self).items() if name != "spikes"}
        least = {name: 0 if name in _MAY_BE_NOTHING else 1 for name in numbers} | {"skip_share": 0.0}
        # `not >=` instead of `<`: a NaN is refused as well.
        wrong = [name for name, number in numbers.items() if not number >= least[name]]
        if wrong or not 0.0 < self.skip_share <= 1.0:
            name = wrong[0] if wrong else "skip_share"
            raise WrongUse(
                f"{name}={getattr(self, name)!r} as a limit",
                allowed="a share above 0 and up to 1; rollbacks, diagnoses and islands from 0, the others from 1",
                do=f"remove {name}, or give an allowed number",
            )


_MAY_BE_NOTHING = {"rollbacks", "diagnoses", "islands"}


def _check_spikes(spikes: object) -> None:
    # True and False are natural guesses; the message names the word that is meant.
    if isinstance(spikes, bool):
        raise WrongUse(
            f"spikes={spikes} as a limit",
            allowed=", ".join(get_args(Spikes)),
            do=f'Limits(spikes="{"refuse" if spikes else "off"}")',
        )
    if spikes not in get_args(Spikes):
        raise build_unknown_name_error("spikes", spikes, get_args(Spikes))


@dataclass
class Streak:
    """The skips since the last applied step of the same optimizers, with their diagnosis."""

    first: int | None = None
    """The attempt of the first skip, or None."""
    diagnosed: str = ""
    """The reason of the skip that was diagnosed last."""
    verdict: Verdict | None = None
    """The last verdict."""
    seen: str = ""
    """The observations on a step that cannot be run again."""
    refused: str = ""
    """How far above the usual the last loss was, if a spike was refused."""
    guard: str = ""
    """The name of the user's own guard that refused the last step."""
    of: str = ""
    """The optimizers that the streak is about, if there are others."""

    def calls_for_diagnosis(self, reason: str) -> bool:
        """Return whether a skip with this reason needs a diagnosis: once per cause."""
        # A cause in the batch, or one that does not repeat, may be another the next time; all others stay the same.
        return reason != self.diagnosed or self.verdict is None or self.verdict.cause in (DATA, NOT_REPRODUCIBLE)

    def earlier_skip(self, attempt: int) -> tuple[int | None, str | None]:
        """Return the first attempt of the streak if its cause is known, and the tensor that was the cause."""
        culprit = None if self.verdict is None else self.verdict.culprit
        if culprit is None or self.first is None or self.first >= attempt:
            return None, None
        return self.first, culprit.outside

    @property
    def excused(self) -> bool:
        """Return whether the skips so far are normal for a loss scale that adjusts."""
        return self.verdict is None or self.verdict.cause == WARM_UP

    @property
    def blames_weights(self) -> bool:
        """Return whether an update before the first skip may have corrupted the weights."""
        if self.guard:
            return False
        if self.verdict is None:
            return bool(self.refused)
        return self.verdict.cause == DIVERGENCE or (self.verdict.cause == STATE and not self._is_for_code)

    @property
    def _is_for_code(self) -> bool:
        """Return whether a change of the code is the only remedy."""
        return self.verdict is not None and all(remedy.kind == "fix_code" for remedy in self.verdict.remedies)

    @property
    def older_weights_may_help(self) -> bool:
        """Return whether a rollback may help.

        It does not if the cause is the batch, the code or a loss scale of the user's choice.
        """
        verdict = self.verdict
        if verdict is None or verdict.cause in (DATA, CODE):
            return verdict is None
        return verdict.cause not in (PRECISION, STATE) or not self._is_for_code

    def as_dict(self) -> dict[str, Any]:
        """Return the streak as plain data."""
        return {**vars(self), "verdict": None if self.verdict is None else self.verdict.as_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Streak:
        """Return the streak from `as_dict()`."""
        verdict = plain["verdict"]
        return cls(**{**plain, "verdict": None if verdict is None else Verdict.from_dict(verdict)})


LAST = 100
"""The attempts over which the share is taken; missing ones at the start count as good."""


class SkipCounter:
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


FALLS = 3
"""The falls in a row after which it is worth checking whether a lower scale will help."""


class OverflowCounter:
    """A counter of overflows of each optimizer since its last applied step."""

    def __init__(self) -> None:
        self._falls: dict[str, int] = {}
        """The falls in a row by optimizer; the scale was lower after each."""
        self._collapsed = 0

    def applied(self, report: StepReport) -> None:
        """Forget the falls of the optimizers that took this step."""
        if self._falls:
            self._falls = {name: falls for name, falls in self._falls.items() if name not in report.parts}
        self._collapsed = 0

    def skipped(self, report: StepReport, scales: Mapping[str, float]) -> bool:
        """Record a skip, and return whether the scale is on its way to a value at which gradients fit: normal.

        `scales` are the loss scales after the step. A scale that does not fall will overflow again.
        """
        # `not <=` instead of `>`: a NaN norm is an overflow too.
        overflowed = {
            name: part
            for name, part in report.parts.items()
            if math.isfinite(part.loss) and not part.grad_norm <= FP32.largest
        }
        falling = {name for name, part in overflowed.items() if scales[name] < part.loss_scale}
        for name in falling:
            self._falls[name] = self._falls.get(name, 0) + 1
        # From the usual 65536 it takes sixteen skips to reach the floor of 1; the seventeenth is stuck there.
        stuck = max((self._falls.get(name, 0) for name in overflowed.keys() - falling), default=0)
        self._collapsed = stuck if report.reason == GRADIENT_NOT_FINITE and stuck >= FALLS else 0
        return report.reason == GRADIENT_OVERFLOW and falling == overflowed.keys()

    def falls(self, report: StepReport) -> int:
        """Return how often in a row the scales of this step have fallen; the maximum over its optimizers."""
        return max((self._falls.get(name, 0) for name in report.parts), default=0)

    @property
    def collapsed(self) -> bool:
        return self._collapsed > 0

    def alarm(self) -> str | None:
        """Return the alarm in words, or None."""
        if not self.collapsed:
            return None
        return f"the loss scale fell {self._collapsed} times in a row and gradients still overflow"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"falls": dict(self._falls), "collapsed": self._collapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self._falls = {str(name): int(falls) for name, falls in state["falls"].items()}
        self._collapsed = int(state["collapsed"])
