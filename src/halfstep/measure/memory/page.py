"""The report of an estimate, and its page: whether it fits, where the memory goes, and the largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.measure.memory.fitting import BatchFit
from halfstep.measure.memory.ledger import build_memory_blocks, build_note_blocks
from halfstep.measure.memory.verdict import DeviceEstimate, EstimateVerdict, name_target_device
from halfstep.page import Block, Heading, Instruction, Page, Paragraph, Span, build_number_table


@dataclass(frozen=True)
class EstimateReport(PageResult):
    """The estimate of a case on some devices."""

    case: str
    devices: tuple[DeviceEstimate, ...]
    interrupted: bool
    verdict: EstimateVerdict

    def page(self) -> Page:
        """Return the page about it."""
        return build_estimate_page(self)


def build_estimate_page(report: EstimateReport, command: str = "") -> Page:
    """Return the page of an estimate, the answer first; `command` is what to type next."""
    answers = report.verdict.answers
    blocks: list[Block] = [Paragraph(Span(one.text, "good" if one.fits else "warn", strong=True)) for one in answers]
    if report.interrupted:
        blocks.append(Paragraph(Span("interrupted: results so far", "warn")))
    if report.devices:
        # The first mode (kept or recomputed activations) that was estimated.
        columns, savings = report.devices[0].columns, report.verdict.savings
        blocks += build_memory_blocks([one for one in columns if one.setting.recompute == columns[0].setting.recompute])
        for row in savings:
            if row.recompute == savings[0].recompute:
                change = (
                    f"{abs(row.saved):.0%} {'less' if row.saved >= 0 else 'more'} memory than fp32 at batch {row.batch}"
                )
                why = f"; {row.why}" if row.why else ""
                blocks.append(Paragraph(f"{row.precision}: {change}{why}", indent=True, gap=True))
    for device in report.devices:
        blocks += _build_device_blocks(device)
    blocks += build_note_blocks(_collect_estimate_notes(report))
    blocks += [Instruction(command, "next: ", gap=True)] if command else []
    return Page(f"memory of {report.case}", tuple(blocks))


def _build_device_blocks(found: DeviceEstimate) -> Iterator[Block]:
    usable = f"{numbers.format_bytes(found.device.usable)} of {numbers.format_bytes(found.device.memory)} for tensors"
    yield Heading(f"Largest batch on {name_target_device(found.device)}", usable)
    rows = [
        (
            row.precision,
            "recomputed" if row.recompute else "kept",
            _format_requested_peak(found, row),
            _format_batch_fit(row),
            str(row.preferred or "-"),
        )
        for row in found.largest
    ]
    if rows:
        yield build_number_table("precision", ["activations", "peak", "largest batch", "multiple of 8"], rows)
    for why in dict.fromkeys(row.why for row in found.not_searched):
        yield Paragraph(Span(why, "warn"), indent=True)
    for name, can in found.abilities.items():
        if can.native is False:
            instead = f"; {found.auto} is the one for it" if found.auto != name else ""
            text = f"{name}: not native on {found.device.device.name}: {can.reason}{instead}"
            yield Paragraph(Span(text, "warn"), indent=True)
    for refused in found.refused:
        yield Paragraph(Span(f"{refused.given}\ndo: {refused.do}", "bad"), indent=True)


def _format_requested_peak(found: DeviceEstimate, row: BatchFit) -> str:
    """Return the peak of the first batch that was requested."""
    for column in found.columns:
        if (column.setting.precision, column.setting.recompute) == (row.precision, row.recompute):
            return numbers.format_bytes(column.peak)
    return "-"


def _format_batch_fit(row: BatchFit) -> str:
    if not row.batch:
        return f"none: {numbers.format_bytes(row.missing)} over"
    if row.at_least:
        return f"no limit up to {row.batch}"
    return f"about {row.batch}" if row.about else f"{row.batch}"


def _collect_estimate_notes(report: EstimateReport) -> dict[str, None]:
    # Notes that the savings give are not repeated.
    said = {row.why for row in report.verdict.savings}
    columns = [column for found in report.devices for column in found.columns if not column.setting.recompute]
    notes = [note for column in columns for note in column.notes if note not in said]
    assumed = [
        f"assumed: {numbers.format_bytes(found.device.reserved)} for the process itself, and "
        f"{found.device.margin:.0%} of the rest for fragmentation"
        for found in report.devices
    ]
    return dict.fromkeys(notes + assumed)
