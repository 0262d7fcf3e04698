"""Word every remedy, and the error that ends a run: the cause, the state of the weights, and one thing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from halfstep.errors import Diverged
from halfstep.guard.repair.remedies import RemedyKind
from halfstep.guard.streak import Limits, Streak
from halfstep.guard.verdict import (
    COMPILER,
    DATA,
    DIVERGENCE,
    NOT_REPRODUCIBLE,
    WARM_UP,
    Cause,
    ProposedRemedyKind,
    Verdict,
)
from halfstep.observe.recorder import OUTSIDE

REPAIR = "--guard repair"
"""The option with which a run applies remedies by itself."""
NEW_DATA = ' (if a new stage of the data has started: Limits(spikes="warn"))'
LOWER_LR = "try a lower learning rate"


class Wording(NamedTuple):
    """One remedy, worded for a user's own script and for a run of `halfstep train`; `{}` is its target."""

    in_python: str
    """The code to write; empty if the learning rate is the better advice."""
    in_words: str
    setting: str
    """The setting or option to add to the command; empty if there is none."""


_WORDINGS: dict[ProposedRemedyKind, Wording] = {
    "island": Wording('halfstep.island(model, "{}") before the Stepper is built', "keep the module {} in fp32", REPAIR),
    "island_function": Wording("{0} = halfstep.island({0})", "keep the function {} in fp32", ""),
    "float_output": Wording("compute the loss from {}", "compute the loss from {}", ""),
    "precision": Wording("precision={}", "compute in {}", "precision={}"),
    "eager": Wording("train without torch.compile", "run without compiled code", "train.compile=false"),
    "lower_rate": Wording("", LOWER_LR, "optimizer.lr={}"),
    "fix_code": Wording("{}", "{}; then continue", ""),
    "restore": Wording("{}", "{}", ""),
    "skip": Wording("", "{}", REPAIR),
}
_BY_CAUSE: dict[Cause, Wording] = {
    DATA: Wording("fix or remove the samples named above", "fix the samples named above, or remove them", REPAIR),
    NOT_REPRODUCIBLE: Wording(
        "look for Python state and random numbers outside torch; if there are none, try another device",
        "skip this batch; if it happens again, look for Python state and random numbers outside torch",
        REPAIR,
    ),
    COMPILER: _WORDINGS["eager"],
}
"""The wordings of causes that no remedy of the verdict was tried for."""


class Advice(NamedTuple):
    """A remedy for a run of `halfstep train`."""

    kind: ProposedRemedyKind | None
    do: str
    setting: str
    """The setting or option that applies it; empty if there is none."""


def advise_remedy(verdict: Verdict, lr: str) -> Advice:
    """Return the advice for a recorded step; `lr` is the learning rate to try where that is the remedy."""
    remedy = next((remedy for remedy in verdict.remedies if remedy.works is not False), None)
    kind = None if remedy is None else remedy.kind
    if verdict.cause == WARM_UP:
        return Advice(kind, "nothing: the loss scale adjusts by itself", "")
    if remedy is None:
        return Advice(kind, "let the run try its remedies", REPAIR)
    if remedy.kind == "island" and not remedy.target:
        return Advice(kind, "keep the model in fp32", REPAIR)
    wording = _WORDINGS[remedy.kind]
    if remedy.kind == "skip":
        wording = _BY_CAUSE.get(verdict.cause, wording)
    target = lr if remedy.kind == "lower_rate" else remedy.target
    return Advice(kind, wording.in_words.format(remedy.target), wording.setting.format(target))


def advise_precision(name: str) -> Advice:
    """Return the advice for a step that is finite in another precision."""
    wording = _WORDINGS["precision"]
    return Advice("precision", wording.in_words.format(name), wording.setting.format(name))


def build_give_up_error(
    alarm: str, streak: Streak, *, mode: str, rates: Sequence[float], back_at: int | None, limits: Limits
) -> Diverged:
    """Return the error that ends a run; `back_at` is the step that the weights were rolled back to, if any."""
    cause = _describe_cause(streak, rates)
    why = f"{cause}. {alarm[0].upper()}{alarm[1:]}; {_describe_kept_weights(streak, back_at)}"
    # A rollback to a snapshot leaves good weights; without one they may be damaged since an unknown step.
    is_damaged = back_at is None and streak.blames_weights
    error = Diverged(
        f"{why}: continue from an earlier checkpoint" if is_damaged else why,
        allowed=f"fewer than {limits.skips_in_a_row} skips in a row, and at most {limits.skip_share:.0%} of the last "
        "100 steps",
        do=f"check the Stepper's guard {streak.guard!r}, or allow more skips: Limits(skip_share=1.0)"
        if streak.guard
        else _suggest_python_remedy(streak.verdict, mode, rates),
    )
    error.verdict = None if streak.verdict is None else streak.verdict.as_dict()
    is_divergence = streak.verdict is None and streak.refused and not streak.guard
    error.cause = streak.verdict.cause if streak.verdict else DIVERGENCE if is_divergence else ""
    error.why = why
    return error


def _describe_cause(streak: Streak, rates: Sequence[float]) -> str:
    verdict = streak.verdict
    if streak.guard:
        return f"the guard {streak.guard!r} refuses steps whose numbers are all finite"
    if verdict is not None:
        module = "" if verdict.culprit is None or verdict.culprit.module == OUTSIDE else verdict.culprit.module
        return verdict.sentence if module in verdict.sentence else f"{verdict.sentence}, and {module} overflows first"
    if streak.refused:
        jumped = (
            f", {rates[-1] / _compute_median_rate(rates):,.0f} times the one before" if _has_rate_jumped(rates) else ""
        )
        at_rate = f" at a learning rate of {rates[-1]:g}{jumped}" if rates else ""
        return f"divergence: {streak.refused}{at_rate}{'' if jumped else NEW_DATA}"
    return streak.seen or "steps are not finite"


def _has_rate_jumped(rates: Sequence[float]) -> bool:
    return bool(rates) and rates[-1] > 2 * _compute_median_rate(rates)


def _describe_kept_weights(streak: Streak, back_at: int | None) -> str:
    if back_at is not None:
        return f"the weights are those of step {back_at}, the last copy before the trouble"
    since = f"every update{f' of {streak.of}' if streak.of else ''} from attempt {streak.first} on was skipped"
    if streak.blames_weights:
        return f"{since}; an earlier update may be the cause"
    return f"{since}: the weights are those from before that attempt"


def _suggest_python_remedy(verdict: Verdict | None, mode: str, rates: Sequence[float]) -> str:
    """Return the remedy for a script of the user's own: a change that was tried first, then one for the cause."""
    if verdict is not None:
        for remedy in verdict.remedies:
            if remedy.works and remedy.kind in get_args(RemedyKind):
                by_hand = _WORDINGS[remedy.kind].in_python.format(remedy.target)
                return by_hand if mode == "repair" else f"guard.mode=repair, or by hand: {by_hand}"
        for remedy in verdict.remedies:
            if remedy.kind in ("fix_code", "restore") and remedy.target:
                return _WORDINGS[remedy.kind].in_python.format(remedy.target)
        if verdict.cause in _BY_CAUSE:
            return _BY_CAUSE[verdict.cause].in_python
    # Without a known cause, or after a divergence: a tenth of the last learning rate, but no more than the usual one.
    return (
        f"optimizer.lr={min(rates[-1] / 10, _compute_median_rate(rates)):g}"
        if rates and rates[-1] > 0
        else "a lower optimizer.lr"
    )


def _compute_median_rate(rates: Sequence[float]) -> float:
    return sorted(rates)[len(rates) // 2]
