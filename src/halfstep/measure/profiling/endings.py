"""How a profile ends where no cause explains the time: nothing is wrong, or there is little to gain."""

from __future__ import annotations

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.measure.profiling import typed, waiting
from halfstep.measure.profiling.cause import Cause
from halfstep.measure.profiling.causes import CLEARLY_FASTER, found
from halfstep.measure.profiling.facts import COPIES, NARROW, PARTS, WIDE, Facts, Race
from halfstep.measure.profiling.words import count

_GOOD = 1.5
_MOST_OF_IT = 0.6
"""Less than a good speed-up is good, too, where it is this much of what Amdahl allows."""
_LITTLE = 1.3
"""A ceiling under this leaves no precision much to win."""


def verdict(facts: Facts) -> Cause:
    """The one cause that explains most, or why there is none. Exactly one, whatever was measured."""
    if facts.idle:
        do = "mend the data or the loss, until a step trains"
        return Cause("no-updates", facts.idle, "", do, typed.again(facts), 0.0)
    causes = found(facts)
    return causes[0] if causes else waiting.unexplained(facts) or _ending(facts)


def _ending(facts: Facts) -> Cause:
    if facts.speed is None:
        return Cause("not-measured", _too_little(facts), "", "give it longer", typed.longer(facts), 0.0)
    if facts.skipped:
        return _partly(facts, facts.speed)
    if not facts.narrow:
        return Cause(
            "already-fast",
            f"nothing is wrong, and nothing narrower than {facts.asked} was asked for",
            _where(facts),
            "try another precision",
            typed.in_precision(facts, facts.instead) if facts.instead != facts.asked else typed.planned(facts),
            0.0,
        )
    if _as_fast_as_can_be(facts, facts.speed):
        return _fast(facts, facts.speed)
    return _slow(facts, facts.speed)


def _too_little(facts: Facts) -> str:
    if facts.race is None:
        return "there was no time to find a cause"
    return (
        f"the speed was not measured well enough: {count(facts.race.pairs, 'pair')} of steps, and a verdict needs "
        f"{FEWEST_FOR_INTERVAL}"
    )


def _partly(facts: Facts, race: Race) -> Cause:
    sentence = f"not measured: {', '.join(facts.skipped)}. In what was, no cause was found: {_gain(facts, race)}"
    return Cause("not-measured", sentence, _where(facts), "give it longer", typed.longer(facts), 0.0)


def _gain(facts: Facts, race: Race) -> str:
    if race.high < 1:
        return f"{facts.asked} is slower: {race.speedup:.2f}x"
    return (
        f"{facts.asked} gains {race.speedup:.2f}x" if race.low > 1 else f"{facts.asked} is no faster than strict fp32"
    )


def _slow(facts: Facts, race: Race) -> Cause:
    ceiling = facts.ceiling_with_data
    bound = f"even with infinitely fast matrix work this model gains {ceiling:.2f}x" if ceiling else ""
    if ceiling is not None and ceiling < _LITTLE:
        sentence = f"there is little matrix work here for {facts.asked} to speed up: {bound}"
        return Cause("little-matrix-work", sentence, _where(facts), "try other settings", typed.planned(facts), 0.0)
    if facts.shares.get(COPIES, 0.0) >= facts.shares.get(NARROW, 0.0):
        sentence = f"casts and layout copies take {facts.shares.get(COPIES, 0.0):.0%} of a step, more than products do"
        do = "lay images out with channels last, or compile"
        return Cause("copies", sentence, _where(facts), do, typed.planned(facts), facts.shares.get(COPIES, 0.0))
    sentence = f"{_gain(facts, race)}, and no single cause stands out"
    return Cause(
        "no-cause",
        sentence,
        "; ".join(filter(None, (_where(facts), bound))),
        "compare settings",
        typed.planned(facts),
        0.0,
    )


def _as_fast_as_can_be(facts: Facts, race: Race) -> bool:
    most = facts.ceiling if facts.ceiling is not None else 0.0
    return race.low > 1 and race.speedup >= min(_GOOD, max(CLEARLY_FASTER, _MOST_OF_IT * most))


def _fast(facts: Facts, race: Race) -> Cause:
    possible = facts.ceiling
    of = f" of a possible {possible:.2f}x" if possible is not None and possible > race.speedup else ""
    return Cause(
        "already-fast",
        f"nothing is wrong: {race.speedup:.2f}x{of}",
        f"{facts.asked} against strict fp32, {race.low:.2f}-{race.high:.2f}x over {count(race.pairs, 'pair')}",
        "see whether other settings are faster still" if facts.own_code else "train",
        typed.trained(facts),
        0.0,
    )


def _where(facts: Facts) -> str:
    """The largest parts that no precision shortens."""
    shares = sorted(((share, part) for part, share in facts.shares.items() if part not in (NARROW, WIDE)), reverse=True)
    return ", ".join(f"{PARTS[part]} {share:.0%}" for share, part in shares[:3] if share > 0)
