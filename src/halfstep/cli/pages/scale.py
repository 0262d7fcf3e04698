"""Print what a step costs on many ranks: the layout to take, memory, collectives, saves, and what failures cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from halfstep import numbers
from halfstep.cli.pages.layout import heading, indented, number_table, pairs
from halfstep.measure.scale.layout import DDP
from halfstep.measure.scale.report import LayoutCost, ScaleReport
from halfstep.measure.scale.upkeep import Upkeep
from halfstep.printable import printable
from halfstep.terminal import screen


def show(report: ScaleReport) -> None:
    """Print the whole report, the answer first."""
    console = screen()
    console.print(Text(printable(report.reason), style="bold green" if report.taken else "bold yellow"))
    console.print(Text(_about(report), style="dim"))
    if report.interrupted:
        console.print(Text("interrupted: these layouts were counted by then", style="yellow"))
    rows = report.layouts
    heading(console, "Memory of a rank", f"{numbers.size(report.device.usable)} for tensors")
    console.print(_memory(rows, console))
    taken = report.taken or rows[-1]
    parts = f"{taken.counts.units} {'buckets' if taken.layout.sharding == DDP else 'units'}"
    heading(console, f"A step of {taken.name}", f"in {parts}; bytes that a rank receives")
    console.print(_collectives(taken, console))
    heading(console, "Links", "by bandwidth alone: a model" if report.links else "")
    console.print(_seconds(rows, console))
    heading(console, f"Beside the steps of {taken.name}")
    console.print(pairs(_upkeep(taken.upkeep)))
    heading(console, "Time left for steps", "at published rates of failure")
    console.print(_goodput(taken.upkeep, console))
    heading(console, "Notes")
    for note in (*report.notes, *_assumed(report, taken.upkeep)):
        console.print(indented(Text(printable(note), style="dim")))


def _about(report: ScaleReport) -> str:
    how = f"{report.setting.precision}{', recomputing' if report.setting.recompute else ''}"
    counts, layout = report.counts, report.counts.layout
    return (
        f"{counts.parameters:,} parameters, {how}, {report.samples:,} samples an update, "
        f"{layout.world:,} ranks on {layout.nodes:,} nodes"
    )


def _memory(rows: Sequence[LayoutCost], console: Console) -> Padding:
    table = number_table(console, "", [row.name for row in rows])
    parts = dict.fromkeys(part for row in rows for part in row.memory)
    for part in parts:
        if any(row.memory.get(part, 0) for row in rows):
            table.add_row(part, *(_size(row.memory.get(part, 0)) for row in rows))
    table.add_section()
    table.add_row(Text("peak", style="bold"), *(Text(numbers.size(row.peak), style="bold") for row in rows))
    table.add_row("fits", *("yes" if row.fits else "no" for row in rows))
    return indented(table, 1)


def _collectives(row: LayoutCost, console: Console) -> Padding:
    table = number_table(console, "", ["calls", "bytes", "inside the node", "between nodes"])
    for one in row.collectives:
        table.add_row(one.collective, f"{one.calls}", _size(one.bytes), _size(one.inside), _size(one.between))
    if not row.collectives:
        table.add_row("none", "", "", "", "")
    return indented(table, 1)


def _seconds(rows: Sequence[LayoutCost], console: Console) -> Padding:
    table = number_table(console, "", ["inside", "between", "computing", "sending", "exposed"])
    for row in rows:
        found = row.seconds
        times = map(_time, (found.computing, found.communication, found.exposed)) if found else ("-",) * 3
        table.add_row(row.name, _size(row.bytes_inside), _size(row.bytes_between), *times)
    return indented(table, 1)


def _upkeep(found: Upkeep) -> dict[str, str]:
    agreement, digest, save, load = found.agreement, found.digest, found.save, found.load
    return {
        "agreement": f"{agreement.calls} all-reduce of {agreement.bytes} B, {agreement.host_reads} host read",
        "replica digest": f"{numbers.size(digest.bytes)} hashed in {_time(digest.seconds)}, at the end of a run",
        "save": f"{numbers.size(save.bytes)} by each of {save.writers:,} writers; {save.files:,} files, "
        f"{save.fsyncs:,} fsyncs; stall {_time(save.stall)}",
        "load": f"{numbers.size(load.bytes)} a rank, read and hashed in {_time(load.seconds)}",
        "file descriptors": f"{found.descriptors.a_rank:,} a rank, {found.descriptors.a_node:,} a node",
        "restart": _time(found.restart.seconds),
    }


def _goodput(found: Upkeep, console: Console) -> Padding:
    table = number_table(console, "rate of", ["a failure every", "save every", "goodput"])
    for row in found.goodput:
        table.add_row(row.rate, _time(row.mean_time_between_failures), _time(row.save_every), f"{row.goodput:.2%}")
    return indented(table, 1)


def _assumed(report: ScaleReport, found: Upkeep) -> list[str]:
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


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _size(size: float) -> str:
    return numbers.size(size) if size else "-"
