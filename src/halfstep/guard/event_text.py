"""Write the events of a guard for a person: the step, the cause, and code to paste; each cause once, then its count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from halfstep.guard.verdict import GuardEvent, Verdict
from halfstep.user_code import warn_user

if TYPE_CHECKING:
    from halfstep.guard.repair.paste import Loop

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
    if event.kind != "verdict" or "attempt" not in event.facts:
        return event.text
    from halfstep.guard.repair.paste import suggest_code  # here, because most runs fail at no step

    verdict = _read_verdict(event.facts)
    times, attempt = int(event.facts.get("times", 1)), event.facts["attempt"]  # type: ignore[call-overload]
    if times > 1:
        # 2, 4, 8 and so on: a cause that stays would otherwise fill the screen.
        return "" if times & (times - 1) else f"attempt {attempt:,} was skipped: the same cause, {times} times so far"
    # Without a verdict, forward() and backward() were called, and there is no loss function to run again.
    code = (_NAMES[loop],) if verdict is None else suggest_code(verdict, loop=loop)
    lines = [
        f"attempt {attempt:,} was skipped, and nothing was lost: weights, optimizer and buffers are unchanged",
        f"  cause: {event.text if verdict is None else verdict.sentence}",
        *(f"  paste: {line}" for line in code),
    ]
    return "\n".join(lines)


_ANOMALY = "torch.autograd.set_detect_anomaly(True)   # before the loop: names the line in backward"
_NAMES: dict[Loop, str] = {
    **dict.fromkeys(("torch", "lightning", "transformers", "accelerate"), _ANOMALY),
    "stepper": "report = guardian.step(loss_fn, batch)   # in place of forward, backward and apply: names the line",
}  # type: ignore[dict-item]
"""By loop: code that names the line of a step that cannot be run again."""


def wrap_text(text: str, columns: int) -> str:
    """Return the text of an event for a terminal of this width; code to paste stays in one line."""
    return "\n".join(_wrap_lines(text, columns))


def _wrap_lines(text: str, columns: int) -> Iterator[str]:
    part = ""
    for line in text.splitlines():
        part = line.partition(":")[0] if line[:9].strip() else part
        indent = " " * (9 if line.startswith("  ") else 4)
        if part == "  paste" or line.startswith(" " * 10):
            yield line
        else:
            yield from wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _read_verdict(facts: Mapping[str, Any]) -> Verdict | None:
    if not all(name in facts for name in VERDICT_FIELDS):
        return None
    return Verdict.from_dict({name: facts[name] for name in VERDICT_FIELDS})
