"""What a step costs on many ranks, and its page: the layout to take, memory, collectives, saves, cost of failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult
from halfstep.measure.memory.devices import Target
from halfstep.measure.memory.ledger import build_note_blocks
from halfstep.measure.scale.counting import RankCounts
from halfstep.measure.scale.layout import DDP, RankLayout
from halfstep.measure.scale.traffic import CollectiveTraffic, DeviceLinks, StepSeconds
from halfstep.measure.scale.upkeep import Upkeep
from halfstep.measure.setting import StepSetting
from halfstep.page import Block, Heading, Page, Pairs, Paragraph, Span, Table, Text, build_number_table


@dataclass(frozen=True)
class LayoutCost(JsonResult):
    """The costs of a step for one rank in one layout."""

    json_keys: ClassVar[tuple[str, ...]] = (
        *("layout.sharding", "layout.world", "layout.nodes", "layout.shard_size", "name", "memory", "peak", "fits"),
        *("counts.state", "counts.padded", "counts.units", "collectives", "bytes_inside", "bytes_between", "seconds"),
        *("counts.parameters", "counts.flops", "upkeep"),
    )
    counts: RankCounts
    memory: dict[str, int]
    """Bytes of each part at the peak."""
    fits: bool
    collectives: list[CollectiveTraffic]
    bytes_inside: int
    """Bytes that a rank receives in a step over the links of its node."""
    bytes_between: int
    """Bytes from other nodes."""
    seconds: StepSeconds | None
    upkeep: Upkeep

    @property
    def layout(self) -> RankLayout:
        return self.counts.layout

    @property
    def name(self) -> str:
        return str(self.layout)

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class ScaleReport(JsonResult, PageResult):
    """Layouts side by side, the least sharded first, and the one to take."""

    json_keys: ClassVar[tuple[str, ...]] = (
        *("case", "counts.layout.world", "counts.layout.nodes", "device", "setting", "samples", "counts.parameters"),
        *("counts.flops", "take", "reason", "layouts", "links", "notes", "interrupted"),
    )
    case: str
    device: Target
    setting: StepSetting
    samples: int
    """Samples of an update, on all ranks."""
    taken: LayoutCost | None
    reason: str
    layouts: tuple[LayoutCost, ...]
    links: DeviceLinks | None
    notes: tuple[str, ...]
    interrupted: bool

    @property
    def counts(self) -> RankCounts:
        """Return those of the first layout: the model's size and work, and the ranks, are the same in all."""
        return self.layouts[0].counts

    @property
    def take(self) -> str | None:
        """Return the name of the layout to take; None if none fits."""
        return self.taken.name if self.taken else None

    def page(self) -> Page:
        """Return the page about it, the answer first."""
        taken = self.taken or self.layouts[-1]
        blocks: list[Block] = [Paragraph(Span(self.reason, "good" if self.taken else "warn", strong=True))]
        blocks.append(Paragraph(Span(_describe_scale_case(self), "dim")))
        if self.interrupted:
            blocks.append(Paragraph(Span("interrupted: these layouts were counted by then", "warn")))
        blocks += [
            Heading("Memory of a rank", f"{numbers.format_bytes(self.device.usable)} for tensors"),
            _build_memory_table(self.layouts),
        ]
        parts = numbers.format_counted_noun(taken.counts.units, "bucket" if taken.layout.sharding == DDP else "unit")
        blocks += [
            Heading(f"A step of {taken.name}", f"in {parts}; bytes that a rank receives"),
            _build_collective_table(taken),
        ]
        blocks += [
            Heading("Links", "by bandwidth alone: a model" if self.links else ""),
            _build_seconds_table(self.layouts),
        ]
        blocks += [Heading(f"Overhead outside the steps of {taken.name}"), _build_upkeep_pairs(taken.upkeep)]
        blocks += [Heading("Time left for steps", "at published rates of failure"), _build_goodput_table(taken.upkeep)]
        blocks += build_note_blocks((*self.notes, *_list_assumptions(self, taken.upkeep)))
        return Page(f"a step of {self.case} on {self.counts.layout.world:,} ranks", tuple(blocks))


def _describe_scale_case(report: ScaleReport) -> str:
    how = f"{report.setting.precision}{', recomputing' if report.setting.recompute else ''}"
    counts, layout = report.counts, report.counts.layout
    return (
        f"{counts.parameters:,} parameters, {how}, {report.samples:,} samples an update, "
        f"{layout.world:,} ranks on {layout.nodes:,} nodes"
    )


def _build_memory_table(layouts: Sequence[LayoutCost]) -> Table:
    every = dict.fromkeys(part for row in layouts for part in row.memory)
    parts = [part for part in every if any(row.memory.get(part) for row in layouts)]
    rows: list[tuple[Text, ...]] = [
        (part, *(_format_size(row.memory.get(part, 0)) for row in layouts)) for part in parts
    ]
    rows += [(), (Span("peak", strong=True), *(Span(numbers.format_bytes(row.peak), strong=True) for row in layouts))]
    rows.append(("fits", *("yes" if row.fits else "no" for row in layouts)))
    return build_number_table("", [row.name for row in layouts], rows)


def _build_collective_table(layout: LayoutCost) -> Table:
    rows = [
        (one.collective, f"{one.calls}", _format_size(one.bytes), _format_size(one.inside), _format_size(one.between))
        for one in layout.collectives
    ]
    titles = ["calls", "bytes", "inside the node", "between nodes"]
    return build_number_table("", titles, rows or [("none", "", "", "", "")])


def _build_seconds_table(layouts: Sequence[LayoutCost]) -> Table:
    rows = []
    for row in layouts:
        found = row.seconds
        times = map(_format_seconds, (found.computing, found.communication, found.exposed)) if found else ("-",) * 3
        rows.append((row.name, _format_size(row.bytes_inside), _format_size(row.bytes_between), *times))
    return build_number_table("", ["inside", "between", "computing", "sending", "exposed"], rows)


def _build_upkeep_pairs(found: Upkeep) -> Pairs:
    agreement, digest, save, load = found.agreement, found.digest, found.save, found.load
    saved = (
        f"{numbers.format_bytes(save.bytes)} by each of {numbers.format_counted_noun(save.writers, 'writer')}; "
        f"{save.files:,} files"
    )
    return Pairs(
        (
            ("agreement", f"{agreement.calls} all-reduce of {agreement.bytes} B, {agreement.host_reads} host read"),
            (
                "replica digest",
                f"{numbers.format_bytes(digest.bytes)} hashed in {_format_seconds(digest.seconds)}, at the end of a "
                "run",
            ),
            ("save", f"{saved}, {save.fsyncs:,} fsyncs; stall {_format_seconds(save.stall)}"),
            ("load", f"{numbers.format_bytes(load.bytes)} a rank, read and hashed in {_format_seconds(load.seconds)}"),
            ("file descriptors", f"{found.descriptors.a_rank:,} a rank, {found.descriptors.a_node:,} a node"),
            ("restart", _format_seconds(found.restart.seconds)),
        )
    )


def _build_goodput_table(found: Upkeep) -> Table:
    rows = [
        (
            row.rate,
            _format_seconds(row.mean_time_between_failures),
            _format_seconds(row.save_every),
            f"{row.goodput:.2%}",
        )
        for row in found.goodput
    ]
    return build_number_table("rate of", ["a failure every", "save every", "goodput"], rows)


def _list_assumptions(report: ScaleReport, found: Upkeep) -> list[str]:
    given, links = found.assumed, report.links
    lines = [
        f"assumed: {given.copy_to_host / 1e9:g} GB/s from a rank to its host, {given.sha256 / 1e9:g} GB/s of "
        f"SHA-256, {given.disk / 1e9:g} GB/s to disk; a failure is seen in {given.detection:g} s, ranks start in "
        f"{given.start:g} s"
    ]
    if links:
        lines.append(
            f"links: {links.inside / 1e9:g} GB/s inside a node, {links.between / 1e9:g} between; "
            f"{links.utilization:.0%} of the peak are computed; {links.source}"
        )
    return lines


def _format_seconds(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _format_size(size: float) -> str:
    return numbers.format_bytes(size) if size else "-"
