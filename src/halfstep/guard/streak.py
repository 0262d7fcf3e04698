"""The skips since the last applied step of the same optimizers, and what is known about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.guard.verdict import DATA, DIVERGENCE, HARDWARE, PRECISION, WARM_UP, Verdict


@dataclass
class Streak:
    first: int | None = None
    """The attempt that it began with; None while all is well."""
    diagnosed: str = ""
    """The reason for which the last diagnosis was made."""
    verdict: Verdict | None = None
    """What the last one said."""
    seen: str = ""
    """What could be seen of a step that cannot be run again."""
    refused: str = ""
    """How far above the usual the last loss was, where a spike was refused."""
    guard: str = ""
    """The name of a person's own guard, where that refused the last step."""
    of: str = ""
    """The optimizers that it is about, where there are others."""

    def calls_for_diagnosis(self, reason: str) -> bool:
        """Once for each culprit: only what lies in the batch or the device may be another thing next time."""
        return reason != self.diagnosed or self.verdict is None or self.verdict.cause in (DATA, HARDWARE)

    @property
    def excused(self) -> bool:
        """Whether the skips so far are what a loss scale needs to find its place."""
        return self.verdict is None or self.verdict.cause == WARM_UP

    @property
    def blames_weights(self) -> bool:
        """Whether an update before the first skip may have spoilt them."""
        if self.guard:
            return False
        return bool(self.refused) if self.verdict is None else self.verdict.cause == DIVERGENCE

    @property
    def older_weights_may_help(self) -> bool:
        """Not where the batch is to blame, or a loss scale that somebody has chosen."""
        verdict = self.verdict
        if verdict is None or verdict.cause == DATA:
            return verdict is None
        return verdict.cause != PRECISION or any(cure.kind != "fix_code" for cure in verdict.cures)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "verdict": None if self.verdict is None else self.verdict.as_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Streak:
        verdict = plain["verdict"]
        return cls(**{**plain, "verdict": None if verdict is None else Verdict.from_dict(verdict)})
