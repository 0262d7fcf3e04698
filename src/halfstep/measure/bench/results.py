"""The results of one training run and the memory of one update: the figures of a bench."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfstep.errors import WrongUse
from halfstep.journal.jsonl import as_line


class RunFailed(Exception):
    """A run without a result; the message is its last output."""


@dataclass(frozen=True)
class BenchMetric:
    """The metric that decides whether a candidate is as good as the baseline."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class Config:
    """The configuration of a candidate."""

    precision: str
    batch: int | None = None
    """Samples of an update on one device; None for a case, whose batch is fixed."""
    settings: tuple[str, ...] = ()
    """Settings of the recipe that define this candidate."""

    def as_dict(self) -> dict[str, Any]:
        return {"precision": self.precision, "batch": self.batch, "settings": list(self.settings)}


@dataclass(frozen=True)
class RunResult:
    """One run of one candidate with one seed. Fields that were not measured are None."""

    seed: int
    metric: float
    """Metric at the end of the run; it may be non-finite."""
    seconds: float | None = None
    """Seconds of the whole run, including evaluation and saves."""
    seconds_per_epoch: float | None = None
    """Seconds of training alone, without the first epoch if there are others, because it includes warm-up."""
    samples_per_second: float | None = None
    epochs: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    """Pairs of seconds since the start and the loss."""
    peak_bytes: int | None = None
    """Peak of the whole run: of the device's allocator if there is one, else of the process."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    joules_per_epoch: float | None = None
    observed: str = ""
    """The formats in which it really computed."""
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for strict JSON: non-finite numbers are words, as in a journal."""
        return spoken(asdict(self))

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> RunResult:
        """Return the result from its saved form."""
        curve = tuple((float(time), float(loss)) for time, loss in kept["curve"])
        return cls(**{**kept, "metric": float(kept["metric"]), "curve": curve})


@dataclass(frozen=True)
class Memory:
    """Memory of one update, in bytes of tensors."""

    measured: int | None = None
    """As counted by the allocator."""
    parts: Mapping[str, int] | None = None
    """Predicted bytes of each part at the peak."""
    note: str = ""

    @property
    def predicted(self) -> int | None:
        """Return the predicted total; None without a prediction."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def peak(self) -> int | None:
        """Return the figure to compare: measured if available, else predicted."""
        return self.measured if self.measured is not None else self.predicted

    def as_dict(self) -> dict[str, Any]:
        parts = dict(self.parts) if self.parts else None
        return {"measured": self.measured, "predicted": self.predicted, "parts": parts, "note": self.note}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Memory:
        """Return the memory from its saved form."""
        return cls(kept["measured"], kept["parts"], kept["note"])


def spoken(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content as strict JSON can represent it."""
    # The journal's own writer, so that both have the same words for NaN and infinity.
    return dict(json.loads(as_line(content)))


# -- configs ----------------------------------------------------------------------------------------------------------
# Configurations that differ in more than their precision: parsed from text, and a usual set.


LARGE = 2
"""Factor of the batch: the usual use of the memory that 16 bits save."""


def usual(batch_size: int, precision: str) -> dict[str, tuple[str, ...]]:
    """Return the usual configurations: mixed precision alone, with a larger batch, and compiled."""
    amp = f"precision={precision}"
    return {
        "AMP": (amp,),
        "AMP+Large": (amp, f"train.batch_size={LARGE * batch_size}"),
        "AMP+Compiled": (amp, "train.compile=true"),
    }


def read_arms(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse `NAME: SETTING SETTING` texts; return settings by name.

    Raises `WrongUse` for a text without a name or settings, and for a repeated name.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, colon, rest = text.partition(":")
        settings = _words(rest)
        if not colon or not name.strip() or not settings:
            raise WrongUse(
                f"--arm {text!r}",
                allowed="a name, a colon, and settings of the recipe",
                do='--arm "large: precision=bf16 train.batch_size=32"',
            )
        if name.strip() in found:
            raise WrongUse(f"two arms named {name.strip()!r}", allowed="a name for each", do="rename one of them")
        found[name.strip()] = settings
    return found


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:  # an unclosed quotation mark
        return ()


def check_places(places: Mapping[str, str]) -> None:
    """Raise `WrongUse` for names that map to the same file, such as `a+b` and `a-b`."""
    seen: dict[str, str] = {}
    for name, place in places.items():
        if place in seen:
            raise WrongUse(
                f"arms named {seen[place]!r} and {name!r}",
                allowed="names that differ in letters or digits",
                do="rename one of them",
            )
        seen[place] = name
