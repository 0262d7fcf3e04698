"""Detect losses far above the usual: one bad batch, a new level, or weights that an update has ruined.

The losses of each optimizer are judged separately. Nothing is emitted until it is known which of the three it is: a
spike once the loss is usual again, a new level after a few losses that stay together, a divergence after a few that are
far beyond all before and do not fall.

If spikes are refused, a refused loss does not raise the limit. But losses that are refused again and again, with usual
ones in between, are no accident: the noise is that large, and is learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from halfstep.guard.alarms.usual_loss import FAR, RecentLosses, check_saved_keys
from halfstep.step.report import GUARD, StepReport

# Judge losses in a row above the limit. One alone says nothing: it may be a bad batch. Losses that stay together or
# fall are a new level: a loss term was switched on, the data has changed, or layers were unfrozen. Losses that are far
# beyond all before and do not fall mean that an update has ruined the weights.


LEVEL, LONGEST = 5, 20
"""The losses in a row that may be a new level, and the maximum that is waited for."""
RISES = math.log(1.5)
"""The rise from the median of their first half to that of the second, in log space, that still counts as level."""


class DivergenceThreshold(NamedTuple):
    """The losses of ruined weights: so many times the highest level of the run, so many in a row."""

    times: float
    in_a_row: int


class Rise(Enum):
    """The judgment on losses above the limit."""

    OPEN = "open"
    """It is not known yet."""
    NEW_LEVEL = "new level"
    RUINED = "ruined"


def classify_rise(logs: Sequence[float], *, far: bool) -> Rise:
    """Judge the losses above the limit since the last usual one, given in log space.

    `far` says whether the newest may be those of ruined weights.
    """
    if len(logs) < LEVEL and not far:
        return Rise.OPEN
    # Losses that neither settle nor explode: after this many steps they are the run's new level, in any shape.
    if len(logs) >= LONGEST:
        return Rise.NEW_LEVEL
    half = len(logs) // 2
    if far:
        # Without a trend, four losses have all of the second half below all of the first one time in six.
        falls = max(logs[-half:]) < min(logs[:half])
        return Rise.OPEN if falls else Rise.RUINED
    return Rise.OPEN if _compute_median(logs[-half:]) > _compute_median(logs[:half]) + RISES else Rise.NEW_LEVEL


def _compute_median(logs: Sequence[float]) -> float:
    ordered = sorted(logs)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


TAIL, LATELY = 8, 32
"""The number of refused losses, among the last so many attempts, that is no accident."""


class LossWatch:
    """The state of one optimizer's losses; `judge` classifies a loss, and the other methods record it."""

    def __init__(self) -> None:
        self.usual = RecentLosses()
        self.above: list[float] = []
        self.above_since = 0
        """The attempt of the first loss in `above`."""
        self._refused: list[tuple[int, float]] = []
        """The recently refused losses, with their attempts."""
        self.just_rolled_back = False
        """Whether the weights were just rolled back: the next loss shows whether they were the cause."""
        self.diverges = False
        """Whether the losses above the limit were reported as a divergence."""
        self._rise_reported = False
        """Whether a level far above the first one was already reported."""

    @property
    def is_calm(self) -> bool:
        """Whether a usual loss changes nothing but what is usual."""
        return not (self.above or self.just_rolled_back or self.diverges)

    def judge(self, loss: float, ruin: DivergenceThreshold) -> Rise | None:
        """Classify a loss together with those above the limit before it; None for a usual one. Nothing is changed."""
        if not loss > self.usual.limit:
            return None
        # Restored weights give the same high loss: the data or the loss has changed, not the weights.
        if self.just_rolled_back:
            return Rise.NEW_LEVEL
        rise = [*self.above, loss]
        newest = rise[-ruin.in_a_row :]
        far = len(newest) == ruin.in_a_row and all(self.usual.is_far(one, ruin.times) for one in newest)
        return classify_rise(self.usual.logs(rise), far=far)

    def hold(self, loss: float, attempt: int) -> None:
        """Record a loss above the limit until it is known what it is."""
        self.above_since = self.above_since if self.above else attempt
        self.above = [*self.above, loss][-LONGEST:]

    def refuse(self, loss: float, attempt: int) -> None:
        """Record a loss above the limit whose update was refused."""
        self.hold(loss, attempt)
        self._refused = [*self._recent_losses(attempt), (attempt, loss)]

    def take(self, loss: float) -> None:
        """Record a usual loss; those above the limit before it were a spike, and are learned too."""
        for one in self.above:
            self.usual.add(one)
        self.usual.add(loss)
        self._over()

    def take_alone(self, loss: float, attempt: int) -> None:
        """Record a usual loss; refused losses before it are learned only if there were many."""
        self._refused = self._recent_losses(attempt)
        if len(self._refused) >= TAIL:
            for _, one in self._refused:
                self.usual.add(one)
            self._refused = []
        self.usual.add(loss)
        self._over()

    def settle(self, loss: float) -> None:
        """Make the losses above the limit the usual ones."""
        self._rise_reported |= self.usual.is_far(loss)
        self.usual.begin_anew([*self.above, loss])
        self._refused = []
        self._over()

    def rewound(self) -> None:
        """Record a rollback to weights from before the losses above the limit."""
        self.just_rolled_back = bool(self.above)
        self.above, self._refused, self.diverges = [], [], False

    def risen(self) -> bool:
        """Return True once, when losses are far above the first ones and that was not reported yet."""
        if self._rise_reported or not self.usual.has_risen:
            return False
        self._rise_reported = True
        return True

    def _over(self) -> None:
        self.above, self.just_rolled_back, self.diverges = [], False, False

    def _recent_losses(self, attempt: int) -> list[tuple[int, float]]:
        return [(at, loss) for at, loss in self._refused if at > attempt - LATELY]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        told = {
            "just_rolled_back": self.just_rolled_back,
            "diverges": self.diverges,
            "rise_reported": self._rise_reported,
        }
        above = {
            "above": list(self.above),
            "above_since": self.above_since,
            "refused": [list(one) for one in self._refused],
        }
        return {"usual": self.usual.state_dict(), **above, **told}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> LossWatch:
        """Return the object from `state_dict()`; raise StateMismatch for a state of another version."""
        watched = cls()
        check_saved_keys(watched.state_dict(), plain)
        watched.usual.load_state_dict(plain["usual"])
        watched.above = [float(loss) for loss in plain["above"]]
        watched.above_since = int(plain["above_since"])
        watched._refused = [(int(attempt), float(loss)) for attempt, loss in plain["refused"]]
        watched.just_rolled_back, watched.diverges = bool(plain["just_rolled_back"]), bool(plain["diverges"])
        watched._rise_reported = bool(plain["rise_reported"])
        return watched


NAME = "spike"
REFUSED = GUARD + NAME
RUIN, PLAIN_RUIN = DivergenceThreshold(times=FAR, in_a_row=5), DivergenceThreshold(times=10.0, in_a_row=4)
"""The losses that mean ruined weights, in general and if the cause is plain.

The second is used if spikes are refused, or if the learning rate has jumped. A loss term that is switched on may give
losses as high, so in general it takes more.
"""
LOUD = 10.0
"""The ratio to the limit above which a spike that has passed is worth a warning."""
Kind = Literal["spike", "new level", "divergence", "risen"]
SPIKE: Kind = "spike"
NEW_LEVEL: Kind = "new level"
DIVERGENCE: Kind = "divergence"
RISEN: Kind = "risen"


@dataclass(frozen=True)
class Notice:
    """One observation on the losses of an optimizer."""

    kind: Kind
    text: str
    loud: bool = True
    """Whether the user should be warned; batches of a few samples have harmless spikes."""


class SpikeGuard:
    """A guard that watches finite losses; with `refuses`, it refuses updates whose loss is far above those before."""

    name = NAME
    same_on_all_ranks = True

    def __init__(self, *, refuses: bool = True) -> None:
        self.refuses = refuses
        self.rate_jumped = False
        """Whether the learning rate is far above the usual one, which explains ruined weights."""
        self._watched: dict[str, LossWatch] = {}
        self.notices: list[Notice] = []
        """The observations on the last step."""
        self.cleared = False
        """Whether the last step showed that weights that were rolled back were not the cause."""

    @property
    def open(self) -> bool:
        """Return whether the newest losses are above the limit for an unknown reason."""
        return any(watched.above for watched in self._watched.values())

    @property
    def diverges(self) -> bool:
        """Return whether the newest losses are those of ruined weights."""
        return any(watched.diverges for watched in self._watched.values())

    def passes(self, report: StepReport) -> bool:
        """Judge the losses of a step; return False if its update must be refused."""
        if self.notices or self.cleared:
            self.notices, self.cleared = [], False
        if not self.refuses and len(report.parts) == 1:
            # Nearly every step.
            ((name, part),) = report.parts.items()
            watched = self._watched.get(name)
            if watched is not None and 0.0 < part.loss <= watched.usual.surely_usual and watched.is_calm:
                watched.usual.add_later(part.loss)
                return True
        for watched in self._watched.values():
            watched.usual.learn()
        ruin = PLAIN_RUIN if self.refuses or self.rate_jumped else RUIN
        rises = {name: self._of(name).judge(part.loss, ruin) for name, part in report.parts.items()}
        # All or none: the optimizers of one step are applied together, so one bad loss refuses all of them.
        if self.refuses and any(rise in (Rise.OPEN, Rise.RUINED) for rise in rises.values()):
            for name, rise in rises.items():
                if rise is not None:
                    self._of(name).refuse(report.parts[name].loss, report.attempt)
                    self._of(name).diverges |= rise is Rise.RUINED
            return False
        for name, rise in rises.items():
            self._take(name, rise, report)
            if self._of(name).risen():
                self._notice(RISEN, self._high(name))
        return True

    def rewound(self) -> None:
        """Record a rollback to good weights: the next losses show whether the weights were the cause."""
        for watched in self._watched.values():
            watched.rewound()

    def words(self, report: StepReport) -> str:
        """Return how far above the usual the worst loss of a step is, in words."""
        name = max(report.parts, key=lambda name: report.parts[name].loss - self._of(name).usual.limit)
        return self._words(name, report.parts[name].loss)

    def _take(self, name: str, rise: Rise | None, report: StepReport) -> None:
        watched, loss = self._of(name), report.parts[name].loss
        if rise is None and self.refuses:
            watched.take_alone(loss, report.attempt)
        elif rise is None:
            if watched.above:
                loud = max(watched.above) > LOUD * watched.usual.limit
                self.notices.append(Notice(SPIKE, f"{self._was(name)}; it is {loss:.4g} again", loud))
            watched.take(loss)
        elif rise is Rise.NEW_LEVEL:
            self.cleared |= watched.just_rolled_back
            self._notice(NEW_LEVEL, self._words(name, loss))
            watched.settle(loss)
        else:
            watched.hold(loss, report.attempt)
            if rise is Rise.RUINED and not watched.diverges:
                watched.diverges = True
                self._notice(DIVERGENCE, self._words(name, loss))

    def _notice(self, kind: Kind, text: str) -> None:
        self.notices.append(Notice(kind, text))

    def _was(self, name: str) -> str:
        watched = self._of(name)
        many = "" if len(watched.above) == 1 else f" and the {len(watched.above) - 1} after it"
        return f"at attempt {watched.above_since}{many}, {self._words(name, max(watched.above))}"

    def _words(self, name: str, loss: float) -> str:
        median = self._of(name).usual.median
        times = f"{loss / median:,.0f} times " if median > 0 else "far above "
        return f"the loss{self._whose(name)} is {loss:.4g}, {times}the median of the steps before ({median:.4g})"

    def _high(self, name: str) -> str:
        usual = self._of(name).usual
        times = f"{usual.median / usual.first:,.0f} times the first ones of the run ({usual.first:.4g})"
        return f"the median of the losses{self._whose(name)} is {usual.median:.4g}, {times}"

    def _whose(self, name: str) -> str:
        return "" if len(self._watched) == 1 else f" of {name}"

    def _of(self, name: str) -> LossWatch:
        watched = self._watched.get(name)
        if watched is None:
            watched = self._watched[name] = LossWatch()
        return watched

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {name: watched.state_dict() for name, watched in self._watched.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; raise StateMismatch for a state of another version."""
        self._watched = {name: LossWatch.from_dict(plain) for name, plain in state.items()}
