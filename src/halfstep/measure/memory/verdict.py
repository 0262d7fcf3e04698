"""Summarize an estimate: whether it fits, what would make it fit, and why memory is not halved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from halfstep.json_data import JsonResult
from halfstep.measure.memory.devices import HERE, Target
from halfstep.measure.memory.fitting import BatchFit
from halfstep.measure.memory.ledger import Ledger, describe_step_setting
from halfstep.numbers import format_bytes

_HALF = 0.45
"""Savings above this share count as half."""


@dataclass(frozen=True)
class EstimateColumn(Ledger):
    """The ledger of a setting that was requested."""

    json_keys: ClassVar[tuple[str, ...]] = (*Ledger.json_keys, "fits")
    fits: bool = False


@dataclass(frozen=True)
class NativeFormat:
    """Whether a device computes in a format natively; `native` is None if the device is only a size."""

    native: bool | None
    reason: str


@dataclass(frozen=True)
class RefusedPrecision:
    """A precision in which the case does not run on a device: the parts of the error."""

    precision: str
    given: str
    allowed: str
    do: str


@dataclass(frozen=True)
class UnsearchedSetting:
    """A setting of which no other batch runs."""

    precision: str
    recompute: bool
    why: str


@dataclass(frozen=True)
class DeviceEstimate:
    """The estimate for one device; its lists grow while it is made."""

    device: Target
    auto: str
    """The precision that `auto` chooses on the device."""
    abilities: dict[str, NativeFormat]
    columns: list[EstimateColumn] = field(default_factory=list)
    refused: list[RefusedPrecision] = field(default_factory=list)
    largest: list[BatchFit] = field(default_factory=list)
    not_searched: list[UnsearchedSetting] = field(default_factory=list)

    @property
    def main_column(self) -> EstimateColumn | None:
        """Return the column of the first line: the device's own precision at the first batch, run as the case is."""
        own = [column for column in self.columns if column.setting.precision == self.auto]
        return next(iter(own or self.columns[-1:]), None)


@dataclass(frozen=True)
class TrainSetting:
    """How to train."""

    precision: str
    batch: int
    recompute: bool


@dataclass(frozen=True)
class MemorySaving(TrainSetting):
    """The memory that a setting saves against fp32 with the same batch."""

    saved: float
    """Share of fp32's peak; negative if it takes more."""
    why: str
    """Why it is less than half; else empty."""


@dataclass(frozen=True)
class VerdictLine:
    """The answer for one device."""

    text: str
    fits: bool


@dataclass(frozen=True)
class EstimateVerdict(JsonResult):
    """A line for each device, the savings on the first, and the setting to use there."""

    json_keys: ClassVar[tuple[str, ...]] = ("lines", "savings", "take")
    answers: tuple[VerdictLine, ...]
    savings: tuple[MemorySaving, ...]
    take: TrainSetting | None

    @property
    def lines(self) -> list[str]:
        return [answer.text for answer in self.answers]


def summarize_estimate(devices: Sequence[DeviceEstimate]) -> EstimateVerdict:
    """Return the verdict on the devices that were estimated."""
    if not devices:
        return EstimateVerdict((VerdictLine("nothing was estimated", fits=False),), (), None)
    return EstimateVerdict(
        tuple(map(_build_verdict_line, devices)),
        list_memory_savings(devices[0].columns),
        _choose_train_setting(devices[0]),
    )


def name_target_device(device: Target) -> str:
    """Return the device's id, or "this machine"."""
    return "this machine" if device.id == HERE else device.id


def _build_verdict_line(page: DeviceEstimate) -> VerdictLine:
    column, place = page.main_column, name_target_device(page.device)
    if column is None:
        return VerdictLine(f"{place}: nothing was estimated", fits=False)
    word = "fits" if column.fits else "does not fit"
    if column.by_cpu_rules:
        word += ", by the CPU's rules"
    how = describe_step_setting(column.setting.precision, column.setting.recompute, column.samples)
    peak, memory = format_bytes(column.peak), format_bytes(page.device.memory)
    return VerdictLine(
        f"{word}: peak {peak} of {memory} on {place} {how}{_describe_largest_batch(page, column)}", column.fits
    )


def _describe_largest_batch(page: DeviceEstimate, column: EstimateColumn) -> str:
    wanted = (column.setting.precision, column.setting.recompute)
    row = next((row for row in page.largest if (row.precision, row.recompute) == wanted), None)
    if row is None:
        return ""
    if row.batch:
        return f"; {describe_batch_fit(row)}"
    fitting = [lever for lever in row.levers if lever.fits]
    short = f"; even {row.smallest} is {format_bytes(row.missing)} too much"
    if not fitting:
        return f"{short} in every setting tried"
    return f"{short}, but {fitting[0].precision}{' with recomputing' if fitting[0].recompute else ''} fits"


def describe_batch_fit(row: BatchFit) -> str:
    """Return the largest batch as text, for a row where some batch fits."""
    if row.at_least:
        return f"no limit found up to batch {row.batch}"
    return f"largest batch about {row.batch}, which fits" if row.about else f"largest batch {row.batch}"


def list_memory_savings(columns: Sequence[EstimateColumn]) -> tuple[MemorySaving, ...]:
    """Return the savings of each column against fp32 with the same batch, and the reason where they are below half."""
    wide = {_build_column_key(column): column for column in columns if column.setting.precision == "fp32"}
    rows = []
    for column in columns:
        base = wide.get(_build_column_key(column))
        if base is not None and base is not column and base.peak:
            saved = 1 - column.peak / base.peak
            # The notes that fp32's column does not have: what did not shrink.
            why = "" if saved >= _HALF else "; ".join(note for note in column.notes if note not in base.notes)
            setting = column.setting
            rows.append(MemorySaving(setting.precision, column.samples, setting.recompute, round(saved, 4), why))
    return tuple(rows)


def _build_column_key(column: EstimateColumn) -> tuple[int, bool]:
    return column.samples, column.setting.recompute


def _choose_train_setting(page: DeviceEstimate) -> TrainSetting | None:
    """Return the setting to train with: as requested if it fits, else the largest batch of the first row that fits."""
    column = page.main_column
    if column is None:
        return None
    if column.fits:
        return TrainSetting(column.setting.precision, column.samples, column.setting.recompute)
    own = [row for row in page.largest if row.precision == page.auto]
    fitting = next((row for row in [*own, *page.largest] if row.batch), None)
    if fitting is None:
        return None
    return TrainSetting(fitting.precision, fitting.preferred or fitting.batch, fitting.recompute)
