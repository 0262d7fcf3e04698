"""What an audit finds beside the lint: work in another format, idle islands, and numbers that do not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfstep.finding import Finding
from halfstep.measure.audit.islands import LEAST_HEADROOM, IslandVerdict
from halfstep.measure.audit.watched import Watched
from halfstep.measure.survival_report import Survival, named, number, where
from halfstep.observe.lint.listener import Spotted
from halfstep.observe.ranges import BACKWARD, Event
from halfstep.precision.precision import Precision

_TOLD_BY_LINT = ("mask-overflows", "reduction-overflows")
_NAMED = 3
_ON_PURPOSE = 0.999
"""Of the largest number: a mask that is filled with the format's own end."""


def overflow(watched: Watched) -> Event | None:
    """The first number that does not fit; None where lint has told of it already."""
    if watched.ranges is None or watched.stopped is not None:
        return None
    event = watched.ranges.first_on_the_way_forward
    # Behind a loss that is not finite no gradient can fit.
    if event is None and not watched.fits and math.isfinite(watched.loss):
        event = watched.ranges.first_overflow.get(BACKWARD)
    return None if event is not None and event.module in told_by_lint(watched) else event


def told_by_lint(watched: Watched) -> set[str]:
    """Modules in which lint found what does not fit."""
    return {module for one in watched.spotted if one.finding.id in _TOLD_BY_LINT for module in one.modules}


def of_the_step(watched: Watched, precision: Precision) -> list[Spotted]:
    """Where work was done, and how near to the end of the format."""
    found = []
    seen = watched.observation
    if seen.share is not None and not seen.as_asked:
        total = sum(seen.flops.values())
        worst = [f"{place} {part / total:.0%}" for place, part in list(seen.strays.items())[:_NAMED]]
        found.append(
            Finding(
                "work-elsewhere",
                "warning",
                f"{1 - seen.share:.0%} of the work is not in {seen.expected}: {', '.join(worst)}",
                "take out what casts or switches autocast off there, or declare it: island(model, ...)",
            )
        )
    if watched.stopped is None:
        found += [
            Finding(
                "island-idle",
                "warning",
                f"nothing ran in the island {named(path)}: its weights may be used without calling it",
                "call the module, or make an island of the one that uses its weights",
            )
            for path in seen.idle_islands
        ]
    return [*map(_without_place, found), *_near_the_end(watched, precision)]


def of_overflow(event: Event, survival: Survival, declared: tuple[str, ...]) -> Spotted:
    do = " or ".join(survival.do) or "find what makes it so large: no island and no format cures it"
    evidence = f"{survival.format} overflows {where(event)}"
    if event.module in declared and event.operation == "aten._to_copy":
        evidence += ", where the island gives back what it was given in"
        do = f"let the island reach to where its numbers are small again, or {do}"
    finding = Finding("overflow", "error", evidence, do)
    return Spotted(finding, event.module, None, (event.module,))


def of_spoiled(survival: Survival) -> Spotted:
    """A loss or gradients that are not finite though every number fits."""
    do = " or ".join(survival.do) or "look at the batch and at the weights: fp32 fails too, or divides by what vanished"
    return _without_place(Finding("not-finite", "error", survival.verdict, do))


def of_islands(verdicts: Iterable[IslandVerdict]) -> list[Spotted]:
    return [
        Spotted(
            Finding(
                "island-not-needed",
                "note",
                f"the island {named(one.path)} costs speed and saves nothing here: {one.why}",
                "take it away and look again, on a batch from later in training too",
            ),
            one.path,
            None,
            (one.path,),
        )
        for one in verdicts
        if one.needed is False
    ]


def _near_the_end(watched: Watched, precision: Precision) -> list[Spotted]:
    if watched.ranges is None or overflow(watched) is not None:
        return []
    limit = precision.computes.largest
    near = {
        module: numbers
        for (module, part), numbers in watched.ranges.by_place.items()
        if part != BACKWARD and 0 <= numbers.headroom < LEAST_HEADROOM and numbers.largest < _ON_PURPOSE * limit
    }
    if not near:
        return []
    module, numbers = min(near.items(), key=lambda pair: pair[1].headroom)
    more = f", and {len(near) - 1} more modules" if len(near) > 1 else ""
    finding = Finding(
        "little-headroom",
        "warning",
        f"{number(numbers.largest)} in {named(module)} against {number(limit)}: {numbers.headroom:.1f} bits from the "
        f"end of {precision.name}{more}",
        f'island(model, "{module}")' if module and not module.startswith("(") else "scale it down, or take bf16",
    )
    return [Spotted(finding, module, None, tuple(near))]


def _without_place(finding: Finding) -> Spotted:
    return Spotted(finding, "", None, ("",))
