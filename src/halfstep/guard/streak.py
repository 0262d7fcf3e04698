"""The limits of a run, and the skips since the last applied step of the same optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from halfstep.errors import WrongUse, unknown_name
from halfstep.guard.verdict import CODE, DATA, DIVERGENCE, HARDWARE, PRECISION, STATE, WARM_UP, Verdict

# -- limits -----------------------------------------------------------------------------------------------------------
# The failures that a run may have before it is stopped, and the time for which a remedy stays.


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
                do=f"leave {name} out, or give a number that is allowed",
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
        raise unknown_name("spikes", spikes, get_args(Spikes))


# -- streak -----------------------------------------------------------------------------------------------------------


@dataclass
class Streak:
    """The skips since the last applied step of the same optimizers, and what is known about them."""

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
        # A cause in the batch or in the device may be a different one the next time; all others stay the same.
        return reason != self.diagnosed or self.verdict is None or self.verdict.cause in (DATA, HARDWARE)

    @property
    def excused(self) -> bool:
        """Return whether the skips so far are normal for a loss scale that adjusts."""
        return self.verdict is None or self.verdict.cause == WARM_UP

    @property
    def blames_weights(self) -> bool:
        """Return whether an update before the first skip may have corrupted the weights."""
        if self.guard:
            return False
        return bool(self.refused) if self.verdict is None else self.verdict.cause in (DIVERGENCE, STATE)

    @property
    def older_weights_may_help(self) -> bool:
        """Return whether a rollback may help.

        It does not if the cause is the batch, the code or a loss scale of the user's choice.
        """
        verdict = self.verdict
        if verdict is None or verdict.cause in (DATA, CODE):
            return verdict is None
        return verdict.cause != PRECISION or any(cure.kind != "fix_code" for cure in verdict.cures)

    def as_dict(self) -> dict[str, Any]:
        """Return the streak as plain data."""
        return {**vars(self), "verdict": None if self.verdict is None else self.verdict.as_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Streak:
        """Return the streak from `as_dict()`."""
        verdict = plain["verdict"]
        return cls(**{**plain, "verdict": None if verdict is None else Verdict.from_dict(verdict)})
