"""Word the error that ends a run: the cause, the state of the weights, and one thing to do."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.errors import Diverged
from halfstep.guard.streak import Limits, Streak
from halfstep.guard.verdict import COMPILER, DATA, DIVERGENCE, HARDWARE, Verdict
from halfstep.observe.recorder import OUTSIDE

BY_HAND = {
    "island": 'halfstep.island(model, "{}") before the Stepper is built',
    "precision": "precision={}",
    "eager": "train without torch.compile",
}

NEW_DATA = ' (if a new stage of the data has begun: Limits(spikes="warn"))'


def farewell(
    alarm: str, streak: Streak, *, mode: str, rates: Sequence[float], back_at: int | None, limits: Limits
) -> Diverged:
    """Return the error that ends a run; `back_at` is the step that the weights were rolled back to, if any."""
    cause = _cause(streak, rates)
    why = f"{cause}. {alarm[0].upper()}{alarm[1:]}; {_kept(streak, back_at)}"
    # A rollback to a snapshot leaves good weights; without one they may be damaged since an unknown step.
    is_damaged = back_at is None and streak.blames_weights
    error = Diverged(
        f"{why}: go on from an earlier checkpoint" if is_damaged else why,
        allowed=f"fewer than {limits.skips_in_a_row} skips in a row, {limits.skip_share:.0%} of the last 100",
        do=_own_guard(streak.guard) if streak.guard else _cure(streak.verdict, mode, rates),
    )
    error.verdict = None if streak.verdict is None else streak.verdict.as_dict()
    is_divergence = streak.verdict is None and streak.refused and not streak.guard
    error.cause = streak.verdict.cause if streak.verdict else DIVERGENCE if is_divergence else cause
    error.why = why
    return error


def _cause(streak: Streak, rates: Sequence[float]) -> str:
    verdict = streak.verdict
    if streak.guard:
        return f"the guard {streak.guard!r} refuses steps whose numbers are all finite"
    if verdict is not None:
        module = "" if verdict.culprit is None or verdict.culprit.module == OUTSIDE else verdict.culprit.module
        return verdict.sentence if module in verdict.sentence else f"{verdict.sentence}, and {module} overflows first"
    if streak.refused:
        return f"divergence: {streak.refused}{_at_rate(rates)}{'' if _jumped(rates) else NEW_DATA}"
    return streak.seen or "steps are not finite"


def _at_rate(rates: Sequence[float]) -> str:
    if not rates:
        return ""
    jumped = f", {rates[-1] / _usual(rates):,.0f} times the one before" if _jumped(rates) else ""
    return f" at a learning rate of {rates[-1]:g}{jumped}"


def _jumped(rates: Sequence[float]) -> bool:
    return bool(rates) and rates[-1] > 2 * _usual(rates)


def _kept(streak: Streak, back_at: int | None) -> str:
    if back_at is not None:
        return f"the weights are those of step {back_at}, the last that were kept while all was well"
    since = f"no update{f' of {streak.of}' if streak.of else ''} was applied since attempt {streak.first}"
    if streak.blames_weights:
        return f"{since}, but one before it may have done the damage"
    return f"{since}: the weights are those from before it"


def _cure(verdict: Verdict | None, mode: str, rates: Sequence[float]) -> str:
    if verdict is not None:
        for cure in verdict.cures:
            if cure.works and cure.kind in BY_HAND:
                by_hand = BY_HAND[cure.kind].format(cure.target)
                return by_hand if mode == "repair" else f"guard.mode=repair, or by hand: {by_hand}"
        fix = next((cure.target for cure in verdict.cures if cure.kind in ("fix_code", "restore")), None)
        if fix:
            return fix
        if verdict.cause == DATA:
            return "mend or leave out the samples that are named"
        if verdict.cause == HARDWARE:
            return "halfstep doctor, and the same run on another device"
        if verdict.cause == COMPILER:
            return BY_HAND["eager"]
    # Without a known cause, or after a divergence: a tenth of the last learning rate, but no more than the usual one.
    return f"optimizer.lr={min(rates[-1] / 10, _usual(rates)):g}" if rates and rates[-1] > 0 else "a lower optimizer.lr"


def _own_guard(name: str) -> str:
    return f"see what {name!r} among the Stepper's guards refuses, or allow it more: Limits(skip_share=1.0)"


def _usual(rates: Sequence[float]) -> float:
    return sorted(rates)[len(rates) // 2]
