"""Write the events of a guard for a person: the step, the cause, and code to paste; each cause once, then its count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from halfstep.guard.repair.paste import Loop, suggest_code
from halfstep.guard.verdict import GuardEvent, Verdict
from halfstep.user_code import warn_user

VERDICT_FIELDS = ("cause", "sentence", "culprit", "evidence", "remedies")


def build_event_warner(loop: Loop) -> Callable[[GuardEvent], None]:
    """Return a listener that emits events as Python warnings, with code for the loop of this library."""
    return partial(warn_of_event, loop=loop)


def warn_of_event(event: GuardEvent, *, loop: Loop = "stepper") -> None:
    """Emit an event as a Python warning, unless it is only information; used if there is no other listener."""
    if event.level == "info":
        return
    text = describe_event(event, loop)
    if text:
        warn_user(text)


def describe_event(event: GuardEvent, loop: Loop = "stepper") -> str:
    """Return the text for a person; empty for a cause that is only counted this time."""
    verdict = _read_verdict(event.facts)
    if event.kind != "verdict" or verdict is None:
        return event.text
    times, attempt = int(event.facts.get("times", 1)), event.facts.get("attempt")  # type: ignore[call-overload]
    if times > 1:
        # 2, 4, 8 and so on: a cause that stays would otherwise fill the screen.
        return "" if times & (times - 1) else f"attempt {attempt:,} was skipped: the same cause, {times} times so far"
    lines = [
        f"attempt {attempt:,} was skipped, and nothing was lost: weights, optimizer and buffers are unchanged",
        f"  cause: {verdict.sentence}",
        *(f"  paste: {line}" for line in suggest_code(verdict, loop=loop)),
    ]
    return "\n".join(lines)


def _read_verdict(facts: Mapping[str, Any]) -> Verdict | None:
    if not all(name in facts for name in VERDICT_FIELDS):
        return None
    return Verdict.from_dict({name: facts[name] for name in VERDICT_FIELDS})
