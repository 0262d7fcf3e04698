"""Hold all that the guard says as plain data: the verdict on a failed step, its record, and events.

The caller decides where events go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from halfstep.draw.notebook import PageResult
from halfstep.step.report import StepReport
from halfstep.step.step_inputs import StepInputs

if TYPE_CHECKING:
    from halfstep.page import Block, Page, Text

Cause = Literal["warm_up", "precision", "data", "code", "state", "divergence", "compiler", "not_reproducible"]
WARM_UP: Cause = "warm_up"
"""The loss scale is adjusting: normal, and over in a few steps."""
PRECISION: Cause = "precision"
"""A number overflows or underflows its format; fp32 is finite."""
DATA: Cause = "data"
"""The batch contains unusable values, was written to in place, or cannot be used a second time."""
CODE: Cause = "code"
"""The model, the loss or on_gradients has no finite result for these inputs in any precision: 0/0, log 0."""
STATE: Cause = "state"
"""A weight or a buffer was non-finite, or impossible, before the step began."""
DIVERGENCE: Cause = "divergence"
"""fp32 fails too, or its loss is far from all before, and losses, norms or weights have grown."""
COMPILER: Cause = "compiler"
"""The same step is finite when it is not compiled."""
NOT_REPRODUCIBLE: Cause = "not_reproducible"
"""Run again, the step is finite: Python state, random numbers not from torch, a nondeterministic operation, or the
device."""

ProposedRemedyKind = Literal[
    "skip", "island", "island_function", "float_output", "precision", "lower_rate", "eager", "fix_code", "restore"
]


@dataclass(frozen=True)
class Culprit:
    """The origin of non-finite values: the first operation that made them, or the tensor that brought them."""

    operation: str
    """The name of the operation, such as aten.mul; empty if the values came from outside."""
    module: str
    backward: bool
    line: str | None
    format: str
    kinds: tuple[str, ...]
    largest_input: float
    in_fp32: float | None
    """The largest absolute value of its result in fp32."""
    limit: float
    """The largest number of its format."""
    outside: str | None = None
    forward: str = ""
    """In backward: the operation whose derivative it is part of, such as aten.sqrt."""
    divisor: Literal["", "number", "signed", "count"] = ""
    """Its second operand: a Python number, or a tensor that contains negative numbers or only integers."""
    batch_path: str = ""
    """The path in the batch to finite numbers that are far too large, as typed; empty if there are none."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Culprit:
        """Return the origin from its fields as JSON has them."""
        return cls(**{**plain, "kinds": tuple(plain["kinds"])})


def locate_culprit(culprit: Culprit | None) -> tuple[object, ...] | None:
    """Return the location fields of an origin; two reruns with equal ones failed in the same place."""
    if culprit is None:
        return None
    return culprit.operation, culprit.module, culprit.backward, culprit.line, culprit.outside


def build_origin_key(verdict: Verdict) -> tuple[object, ...]:
    """Return the cause and the place of a verdict: sentences of the same origin differ in their numbers."""
    return verdict.cause, *(locate_culprit(verdict.culprit) or (_NUMBERS.sub("#", verdict.sentence),))


_NUMBERS = re.compile(r"(?<![\w.])\d[\d,]*(\.\d+)?(e[+-]?\d+)?(?![\w.]*\w)")
"""Numbers of a sentence that are no part of a name, as in `0.weight`."""


@dataclass(frozen=True)
class ProposedRemedy:
    """A remedy that a verdict proposes."""

    kind: ProposedRemedyKind
    target: str
    """The path of an island, the name of a function or a precision, or a sentence."""
    works: bool | None
    """Whether the same step was finite with it; None if it cannot be tried."""


@dataclass(frozen=True)
class Verdict(PageResult):
    """The cause of a failed step, its origin, the evidence and possible remedies."""

    cause: Cause
    sentence: str
    """One line that the user can act on."""
    culprit: Culprit | None
    evidence: tuple[str, ...]
    remedies: tuple[ProposedRemedy, ...]
    """Possible remedies, the smallest first; those that were tried and work come before the others."""

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"  {one}" for one in self.evidence)])

    def page(self) -> Page:
        """Return the page about it: the sentence, and the evidence."""
        from halfstep.page import Items, Page, Paragraph

        shown: tuple[Block, ...] = (Paragraph(self.colored_sentence()),)
        if self.evidence:
            shown += (Items(self.evidence, dashes=True),)
        return Page("why a step failed", shown)

    def colored_sentence(self) -> Text:
        """Return the sentence with its cause in color."""
        from halfstep.page import Span

        cause = Span(self.cause.replace("_", " "), "good" if self.cause == "warm_up" else "warn", strong=True)
        return cause, f": {self.sentence.removeprefix(f'{self.cause}: ')}"

    def as_dict(self) -> dict[str, object]:
        """Return the verdict as plain data."""
        return {
            **asdict(self),
            "evidence": list(self.evidence),
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Verdict:
        """Return the verdict from `as_dict()`."""
        culprit = plain["culprit"]
        return cls(
            plain["cause"],
            plain["sentence"],
            None if culprit is None else Culprit.from_dict(culprit),
            tuple(plain["evidence"]),
            tuple(ProposedRemedy(**remedy) for remedy in plain["remedies"]),
        )


Kind = Literal["verdict", "remedy", "alarm", "probation"]
Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class GuardEvent:
    """One event: a cause was found, a remedy was placed or lifted, or an alarm was raised."""

    kind: Kind
    level: Level
    text: str
    """The message for users; the verdict comes first."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The same as data."""

    def as_dict(self) -> dict[str, object]:
        """Return the event as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class StepHistory:
    """The applied steps before a failed one, from numbers that all ranks share."""

    losses: tuple[float, ...] = ()
    """The losses of applied steps, the newest last."""
    grad_norms: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    """The learning rates of these steps."""


@dataclass(frozen=True)
class FailedStep:
    """The record of a failed step, for a replay."""

    attempt: StepInputs
    report: StepReport
    precision: str
    islands: tuple[str, ...]
    history: StepHistory
    verdict: Verdict
