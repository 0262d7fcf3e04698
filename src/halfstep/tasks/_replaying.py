"""A failed step, run again in several ways, and what came of it as plain data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from halfstep.guard.replay.compiled import uses_compiled
from halfstep.guard.replay.diagnose import diagnose
from halfstep.guard.replay.rerun import Way
from halfstep.guard.replay.trials import Outcome, Trials
from halfstep.guard.verdict import Culprit, Verdict
from halfstep.precision.precision import Precision
from halfstep.precision.registry import precision_named
from halfstep.step.attempt import Attempt
from halfstep.step.report import GRADIENT_NOT_FINITE, GUARD, LOSS_NOT_FINITE
from halfstep.tasks._replayed import Replayed
from halfstep.train.black_box.record import Record

ALSO = ("fp32", "bf16")
"""Precisions that a failed step is tried in, whatever it ran in."""
ROUNDS = len(ALSO) + 3
"""Its own, those above, the diagnosis, and an island."""
Told = Callable[[int, int], None]


def described(record: Record) -> dict[str, Any]:
    """What the run wrote down."""
    report, verdict = record.report, record.verdict
    return {
        "attempt": report.attempt,
        "step": report.step,
        "reason": report.reason,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale,
        "precision": record.precision,
        "islands": list(record.islands),
        "device": record.environment.get("device"),
        "verdict": verdict.as_dict(),
        "without": record.without,
    }


def replay(replayed: Replayed, report: dict[str, Any], told: Told) -> Verdict | None:
    """Fill in `report` as it comes; the verdict, or None where the step is finite here."""
    rounds = _Rounds(report, told)
    record, precision = replayed.record, replayed.choice.precision
    attempt, first = _failing(replayed, rounds)
    ways = [name for name in dict.fromkeys((record.precision, *ALSO)) if name != precision.name]
    for name in ways[: len(ALSO)]:
        rounds.note(name, _tried(replayed, attempt, precision_named(name)), precision_named(name))
    verdict = _verdict(replayed, attempt, first)
    rounds.count()
    if verdict is not None:
        report["verdict"] = verdict.as_dict()
        report["same_culprit"] = _key(verdict.culprit) == _key(record.verdict.culprit)
        _try_island(replayed, attempt, verdict, rounds)
    told(ROUNDS, ROUNDS)
    return verdict


class _Rounds:
    """The rows of the table, and the bar above them."""

    def __init__(self, report: dict[str, Any], told: Told) -> None:
        self._rows: list[dict[str, Any]] = report.setdefault("reruns", [])
        self._told, self._done = told, 0
        told(0, ROUNDS)

    def note(self, way: str, outcome: Outcome, precision: Precision, island: str | None = None) -> None:
        self._rows.append(
            {
                "way": way,
                "precision": precision.name,
                "island": island,
                "finite": outcome.finite,
                "loss": outcome.loss,
                "grad_norm": outcome.grad_norm,
                "error": outcome.error,
            }
        )
        self.count()

    def count(self) -> None:
        self._done += 1
        self._told(self._done, ROUNDS)


def _failing(replayed: Replayed, rounds: _Rounds) -> tuple[Attempt, Outcome]:
    """Of several processes, the first whose step fails here; each had a batch of its own."""
    precision = replayed.choice.precision
    own = precision.name == replayed.record.precision
    for rank, load in enumerate(replayed.attempts):
        attempt = load()
        outcome = _tried(replayed, attempt, precision)
        if not outcome.finite or rank == len(replayed.attempts) - 1:
            break
    whose = f", process {rank}" if len(replayed.attempts) > 1 else ""
    rounds.note(f"as it was: {precision.name}{whose}" if own else f"{precision.name}{whose}", outcome, precision)
    return attempt, outcome


def _tried(replayed: Replayed, attempt: Attempt, precision: Precision, islands: tuple[str, ...] = ()) -> Outcome:
    # The loss is the same at any scale, and a scale that was right for the step as it was is so for nothing else.
    as_it_was = precision.name == replayed.record.precision and not islands
    scaled = as_it_was and replayed.record.report.reason != LOSS_NOT_FINITE
    return Trials(replayed.model, attempt).run(Way(precision, islands, None if scaled else 1.0))


def _verdict(replayed: Replayed, attempt: Attempt, first: Outcome) -> Verdict | None:
    """None where the step is finite in what it was run in, unless a guard refused it for other reasons."""
    record, precision = replayed.record, replayed.choice.precision
    reason = record.report.reason or ""
    judge = functools.partial(
        diagnose,
        replayed.model,
        attempt,
        precision=precision,
        history=record.history,
        compiled=uses_compiled(replayed.model),
    )
    if precision.name == record.precision:
        # Elsewhere, that it is finite is no sign of a broken device.
        here = not first.finite or reason.startswith(GUARD) or not replayed.notes
        return judge(reason=reason) if here else None
    if first.finite:
        return None
    return judge(reason=LOSS_NOT_FINITE if first.loss != first.loss else GRADIENT_NOT_FINITE)


def _try_island(replayed: Replayed, attempt: Attempt, verdict: Verdict, rounds: _Rounds) -> None:
    path = next((cure.target for cure in verdict.cures if cure.kind == "island"), None)
    if path is not None:
        precision = replayed.choice.precision
        way = f"{precision.name}, {path or 'the model'} in fp32"
        rounds.note(way, _tried(replayed, attempt, precision, (path,)), precision, path)


def _key(culprit: Culprit | None) -> Any:
    if culprit is None:
        return None
    return culprit.operation, culprit.module, culprit.backward, culprit.line, culprit.outside
