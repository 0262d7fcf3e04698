"""Convert a failed step to plain data for JSON, and back with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from halfstep.checkpoint.packing import pack, unpack
from halfstep.checkpoint.sealed import Sealed
from halfstep.guard.events import FailedStep, History
from halfstep.guard.verdict import Cause, CureKind, Verdict
from halfstep.step.report import OptimizerReport, StepReport
from halfstep.step.step_inputs import StepInputs
from halfstep.train.failed_steps.places import is_file_name

FORMAT = 2
"""Increased when readers of the old format could not read the new one."""
MOST_RANKS = 100_000
_KEYS = {"batches", "environment", "files", "fleeting", "format", "recipe", "seal", "step", "without"}


@dataclass(frozen=True)
class Record:
    """A failed step as it was recorded."""

    path: Path
    report: StepReport
    precision: str
    islands: tuple[str, ...]
    history: History
    verdict: Verdict
    """The verdict of the run."""
    batch_changed: bool
    """Whether the batch was written to before it was recorded: a replay may then differ."""
    recipe: str
    """A SHA-256 of the settings that affect the computation."""
    environment: Mapping[str, Any]
    files: Mapping[str, Sealed]
    batches: tuple[Any, ...]
    """For each rank, its micro-batches and their inputs, with names in place of tensors."""
    fleeting: tuple[str, ...]
    """The model's non-persistent buffers."""
    without: str
    """Why there are no tensors; empty where there are."""


def as_plain(trouble: FailedStep) -> Any:
    """Return everything but tensors; non-finite numbers in the form of `pack`."""
    report = trouble.report
    content = {
        "report": {**report._asdict(), "parts": {name: part._asdict() for name, part in report.parts.items()}},
        "precision": trouble.precision,
        "islands": trouble.islands,
        "history": asdict(trouble.history),
        "verdict": trouble.verdict.as_dict(),
        "batch_changed": _has_changed(trouble.attempt),
    }
    return pack(_with_lists(content), "the step")[0]


def _has_changed(attempt: StepInputs) -> bool:
    try:
        return attempt.batch_changed
    except Exception:
        return False  # a batch that cannot be inspected is not recorded either


def _with_lists(value: Any) -> Any:
    """Return nested lists: JSON has one kind of sequence, and the record is also read by people."""
    if isinstance(value, Mapping):
        return {key: _with_lists(inner) for key, inner in value.items()}
    return [_with_lists(inner) for inner in value] if isinstance(value, (list, tuple, set, frozenset)) else value


def record_from(content: Mapping[str, Any], path: Path) -> Record:
    """Return the record in a file of this format; raise ValueError, TypeError or KeyError where it is forged."""
    if set(content) != _KEYS:
        raise ValueError(f"no record of form {FORMAT}")
    step = unpack(content["step"], {}, str(path))
    batches = _list(content["batches"])
    if len(batches) > MOST_RANKS:
        raise ValueError(f"{len(batches):,} processes")
    return Record(
        path,
        _report(step["report"]),
        _text(step["precision"]),
        _texts(step["islands"]),
        History(**{name: _numbers(values) for name, values in step["history"].items()}),
        _verdict(step["verdict"]),
        step["batch_changed"] is True,
        _text(content["recipe"]),
        dict(content["environment"]),
        {name: _sealed(name, *entry) for name, entry in content["files"].items()},
        tuple(batches),
        _texts(content["fleeting"]),
        _text(content["without"]),
    )


def _report(plain: Mapping[str, Any]) -> StepReport:
    parts = {
        _text(name): OptimizerReport(*_numbers(part[key] for key in OptimizerReport._fields))
        for name, part in plain["parts"].items()
    }
    return StepReport(
        step=_count(plain["step"]),
        attempt=_count(plain["attempt"]),
        applied=plain["applied"] is True,
        reason=None if plain["reason"] is None else _text(plain["reason"]),
        finite=plain["finite"] is True,
        loss=_number(plain["loss"]),
        grad_norm=_number(plain["grad_norm"]),
        loss_scale=_number(plain["loss_scale"]),
        parts=parts,
    )


def _verdict(plain: Mapping[str, Any]) -> Verdict:
    verdict = Verdict.from_dict(plain)
    if verdict.cause not in get_args(Cause) or any(cure.kind not in get_args(CureKind) for cure in verdict.cures):
        raise ValueError(f"a cause or a cure that is not known: {verdict.cause!r}"[:200])
    _texts([verdict.sentence, *verdict.evidence, *(cure.target for cure in verdict.cures)])
    if (culprit := verdict.culprit) is not None:
        _texts([culprit.operation, culprit.module, culprit.format, *culprit.kinds])
        _texts([text for text in (culprit.line, culprit.outside) if text is not None])
        _numbers([culprit.largest_input, culprit.limit, culprit.in_fp32 or 0.0])
    return verdict


def _sealed(name: str, size: int, sha256: str) -> Sealed:
    if not is_file_name(name):
        raise ValueError(f"{name!r} is no file of a failed step"[:200])
    return Sealed(name, _count(size), _text(sha256))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} where a list should be")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text should be")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(values)))


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"a {type(value).__name__} where a number should be")
    return float(value)


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(map(_number, values))


def _count(value: Any) -> int:
    # Larger integers do not survive JSON readers that use doubles.
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("no count")
    return value
