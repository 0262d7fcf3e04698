"""The memory of one step as a ledger, whose parts add up to its peak, and its page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult
from halfstep.measure.assumption import Assumption
from halfstep.measure.memory_bars import MemoryUse, draw_memory_bars
from halfstep.measure.setting import StepSetting
from halfstep.measure.survival_report import THE_MODEL_ITSELF
from halfstep.page import Block, Heading, Page, Paragraph, Span, Table, Text, build_charts, build_number_table

PARTS = (
    "weights",
    "buffers",
    "average",
    "optimizer",
    "batch",
    "gradients",
    "cast copies",
    "activations",
    "temporary",
)
"""The uses of memory. `cast copies` are autocast's copies of weights; `activations` are saved for backward."""

WORKING = ("activations", "temporary")
"""The parts that a rank has whole, however its model is sharded; autocast's copies give way to gathered parameters."""


@dataclass(frozen=True)
class LedgerNote:
    """A remark that readers of the figures need."""

    text: str
    only_here: bool = False
    """Whether it applies only to the device whose rules were followed, not to others with the same ledger."""


@dataclass(frozen=True)
class Ledger(JsonResult, PageResult):
    """The memory of one update of a setting, in bytes, once the optimizer has its state."""

    json_keys: ClassVar[tuple[str, ...]] = (
        *("setting", "device", "samples", "peak", "at_peak", "whole", "by_format", "by_module", "moment", "verified"),
        *("notes", "assumptions"),
    )
    setting: StepSetting
    device: str
    samples: int
    """Samples in a micro-batch."""
    at_peak: Mapping[str, int]
    """Bytes of each part at the moment of the peak."""
    whole: Mapping[str, int]
    """Bytes of each part at its own maximum."""
    by_format: Mapping[str, int]
    """Activations at the end of forward, by format."""
    by_module: Mapping[str, int]
    """Activations at the end of forward, by the module that saves them, largest first."""
    moment: str
    """The moment of the peak: `the backward of layer1.0.conv2`, `the update`."""
    working: int = 0
    """The most of `WORKING` in forward and backward."""
    updating: int = 0
    """The most of `WORKING` in the update."""
    verified: bool = False
    """Whether such predictions have been compared with real runs on such a device."""
    by_cpu_rules: bool = False
    """Whether the CPU's autocast rules stand in for those of the device."""
    remarks: tuple[LedgerNote, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    """Assumptions about numbers of the model that its code reads."""

    def page(self) -> Page:
        """Return the page about it."""
        how = describe_step_setting(self.setting.precision, self.setting.recompute, self.samples)
        answer = Paragraph(Span(f"peak {numbers.format_bytes(self.peak)} {how}", strong=True))
        return Page(
            "memory of one update", (answer, *build_memory_blocks([self]), *build_note_blocks(self.notes)), self.device
        )

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the texts of the remarks."""
        return tuple(remark.text for remark in self.remarks)


def describe_step_setting(precision: str, recompute: bool, samples: int) -> str:
    """Return how a step is run as text."""
    return f"in {precision}{' with recomputing' if recompute else ''} at batch {samples}"


# -- page -------------------------------------------------------------------------------------------------------------

_MODULES = 5


def build_memory_blocks(columns: Sequence[Ledger]) -> Iterator[Block]:
    """Yield where the memory goes, the ledgers of one batch size next to each other."""
    for samples in dict.fromkeys(column.samples for column in columns):
        together = [column for column in columns if column.samples == samples]
        moments = {column.moment for column in together}
        how = ", recomputing" if together[0].setting.recompute else ""
        yield Heading(f"At the peak, batch {samples}{how}", moments.pop() if len(moments) == 1 else "")
        yield _build_parts_table(together)
        uses = [MemoryUse(column.setting.precision, column.at_peak, None) for column in together]
        yield from build_charts(draw_memory_bars(uses, f"Tensors at the peak, batch {samples}"))
        if any(column.by_format for column in together):
            yield Heading("Saved for backward", "at the end of forward, by format and by module")
            by_format, by_module = [column.by_format for column in together], [column.by_module for column in together]
            rows = [*_list_rows_by_size(by_format), (), *_list_rows_by_size(by_module)[:_MODULES]]
            yield build_number_table("", [column.setting.precision for column in together], rows)


def build_note_blocks(notes: Iterable[str]) -> Iterator[Block]:
    """Yield notes below a heading; nothing if there are none."""
    for number, note in enumerate(notes):
        if number == 0:
            yield Heading("Notes")
        yield Paragraph(Span(note, "dim"), indent=True)


def _build_parts_table(columns: Sequence[Ledger]) -> Table:
    parts = [part for part in columns[0].at_peak if any(column.at_peak[part] for column in columns)]
    rows: list[tuple[Text, ...]] = [
        (part, *(numbers.format_bytes(column.at_peak[part]) for column in columns)) for part in parts
    ]
    peaks = (Span(numbers.format_bytes(column.peak), strong=True) for column in columns)
    rows += [(), (Span("peak", strong=True), *peaks)]
    if len({column.moment for column in columns}) > 1:
        rows.append(("peak in", *(column.moment for column in columns)))
    return build_number_table("", [column.setting.precision for column in columns], rows)


def _list_rows_by_size(columns: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Return a row for each name that is non-zero in any column, largest first."""
    most = {name: max(column.get(name, 0) for column in columns) for column in columns for name in column}
    names = sorted((name for name, size in most.items() if size), key=lambda name: -most[name])
    return [
        (
            name or THE_MODEL_ITSELF,
            *(numbers.format_bytes(column[name]) if column.get(name) else "-" for column in columns),
        )
        for name in names
    ]
