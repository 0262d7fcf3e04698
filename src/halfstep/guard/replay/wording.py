"""The sentences of a verdict: what happened first, what helps after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep.guard.replay.bad_batch import Spot
from halfstep.guard.replay.trials import Outcome
from halfstep.guard.verdict import Culprit, Cure
from halfstep.observe.recorder import OUTSIDE
from halfstep.precision.precision import Precision

BATCH_WRITTEN = "the batch was written to in place during the step"
CLONE_FIRST = "copy a tensor of the batch before writing into it: x = x.clone()"
ONLY_COMPILED = "compiler: the step is finite when it is not compiled, and not finite when it is"
NOT_AGAIN = (
    "hardware: it does not happen again: an operation that is not deterministic, random numbers that are not torch's, "
    "or the device"
)
OTHER_LOSS = "give a loss function that can be called twice with the same batch: again=..., and no iterator as a batch"
FINITE_WITHOUT = "with another sample in its place the step is finite"


def not_run(outcome: Outcome) -> str:
    return f"data: the step could not be run again: {outcome.error}; so its cause is not known"


def refused(reason: str) -> str:
    return f"divergence: all numbers are finite, and {reason.partition(':')[2]} refused the step"


def place(outcome: Outcome) -> str:
    """Who did it: up3.conv2 (aten.convolution, models/unet.py:41)."""
    culprit = outcome.culprit
    if culprit is None:
        return f"the gradient of {outcome.bad_parameters[0]}" if outcome.bad_parameters else "the step"
    if culprit.outside is not None:
        return culprit.outside
    where = {"": "the model's own forward", OUTSIDE: "the loss"}.get(culprit.module, culprit.module)
    details = [
        culprit.operation,
        *(["in backward"] if culprit.backward else []),
        *([culprit.line] if culprit.line else []),
    ]
    return f"{where} ({', '.join(details)})"


def what_happened(outcome: Outcome) -> str:
    return f"{place(outcome)} {outcome.deed or 'is not finite'}"


def scale_too_high(scale: float, at_scale: Outcome) -> str:
    sentence = f"gradients overflow at a loss scale of {scale:g} and fit without one"
    culprit = at_scale.culprit
    if culprit is None or culprit.in_fp32 is None or not math.isfinite(culprit.in_fp32):
        return sentence
    halvings = max(1, math.ceil(math.log2(max(culprit.in_fp32 / culprit.limit, 1.0))))
    return f"{sentence}; {what_happened(at_scale)}, so {scale / 2**halvings:g} may fit"


def precision(precision: Precision, outcome: Outcome, cures: Sequence[Cure]) -> str:
    works = [_named(cure) for cure in cures if cure.works]
    too = [f"{works[0]} is finite", *(f"{name} is finite too" for name in works[1:])] if works else []
    happened = what_happened(outcome)
    if precision.name not in happened:
        happened += f" in {precision}"
    return f"precision: {'; '.join([happened, *([', '.join(too)] if too else []), *_wrap(outcome.culprit)])}"


def not_helping(cures: Sequence[Cure]) -> tuple[str, ...]:
    return tuple(f"{_named(cure)} is not finite either" for cure in cures if cure.works is False)


def _wrap(culprit: Culprit | None) -> list[str]:
    """No module has the operation to itself, so that only its function can be made an island."""
    if culprit is None or culprit.outside is not None or culprit.module not in ("", OUTSIDE):
        return []
    return ["wrap it: halfstep.island(fn)"]


def _named(cure: Cure) -> str:
    return f"an island round {cure.target}" if cure.kind == "island" else cure.target


def diverged(fp32: Outcome) -> str:
    return f"divergence: {what_happened(fp32)}; fp32 fails too"


def fix(fp32: Outcome) -> str:
    where = fp32.culprit.line if fp32.culprit is not None and fp32.culprit.line else place(fp32)
    return f"change {where}, which {fp32.deed}"


def spot(found: Spot) -> str:
    many = f", one of {found.many:,} such numbers" if found.many > 1 else ""
    return f"{found} holds {found.value}{many}"


def far(found: Spot, outcome: Outcome) -> str:
    return f"data: {found} reaches {found.value}; {what_happened(outcome)}"
