"""Print an audit: the verdict, the findings, the modules and islands, and one command to type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, print_finding, ruled_table
from halfstep.printable import printable
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.measure.audit.report import Audit, IslandVerdict, ModuleRow, Numbers

_MOST_MODULES = 12
_WIDE = 100
"""Terminal columns from which on the page has room for gradients."""
_MIXED = 0.995
_FEW_BITS = 1.0
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class ShownModule:
    """A line of the table: a module, or several whose paths differ only by a number."""

    row: ModuleRow
    """For several modules the sum of their FLOPs and the worst of their numbers."""
    names: tuple[str, ...]


def show(found: Audit, following: str, *, every: bool = False, picture: Path | None = None) -> None:
    """Print the whole report, and the command to type next."""
    console = screen()
    if found.interrupted:
        console.print(Text("interrupted: this is what was seen until then", style="yellow"))
    console.print(_verdict(found))
    console.print(Text(printable(_circumstances(found)), style="dim"))
    if found.stopped:
        console.print(Text(f"the step ended early: {printable(found.stopped)}", style="yellow"))
    for one in found.spotted:
        evidence, fix = printable(one.finding.evidence), printable(one.finding.fix)
        print_finding(console, replace(one.finding, evidence=evidence, fix=fix))
    _print_modules(console, found, every)
    _print_islands(console, found.islands)
    console.print()
    for note in found.notes:
        console.print(Text(printable(note), style="dim"))
    if picture is not None and found.rows:
        console.print(Text(f"picture: {printable(picture)}"), soft_wrap=True)
    console.print()
    console.print(Text(f"  $ {printable(following)}", style="bold"), soft_wrap=True)  # not wrapped, for copying


def _verdict(found: Audit) -> Text:
    worst = {one.finding.severity for one in found.spotted}
    colour = "red" if "error" in worst else "yellow" if "warning" in worst or found.interrupted else "green"
    return Text(printable(found.precision), style=f"bold {colour}").append(f": {found.verdict}", style="not bold")


def _circumstances(found: Audit) -> str:
    words = [found.subject, found.device]
    total = sum(found.flops.values())
    if total:
        shares = ", ".join(f"{name} {_share(count / total)}" for name, count in found.flops.items())
        words.append(f"all work: {shares}")
    if found.island_share:
        words.append(f"{_share(found.island_share)} in islands")
    if found.loss_scale:
        words.append(f"loss scale {found.loss_scale:.0f}")
    return "; ".join(words)


def _print_modules(console: Console, found: Audit, every: bool) -> None:
    lines = [ShownModule(row, (row.module,)) for row in found.rows] if every else together(found.rows)
    if not lines:
        return
    named = {module for one in found.spotted for module in one.modules}
    # Those with findings and islands first.
    lines.sort(key=lambda line: (named.isdisjoint(line.names) and line.row.island not in line.names, -line.row.share))
    shown = lines if every else lines[:_MOST_MODULES]
    count = sum(len(line.names) for line in shown)
    aside = "" if count == len(found.rows) else f"; {count} of {len(found.rows)}, see --all"
    heading(console, "Modules", f"findings and islands first, then by work{aside}")
    console.print(_table(shown, console, found.format))


def together(rows: Sequence[ModuleRow]) -> list[ShownModule]:
    """Merge modules whose paths differ only by a number and whose formats agree into one line."""
    groups: dict[tuple[str, ...], list[ModuleRow]] = {}
    for row in rows:
        computed = (f"{name} {share:.2f}" for name, share in row.computed.items())
        key = (_NUMBER.sub("*", row.module), row.kind, _formats(row.stored), _formats(row.saved), *computed)
        groups.setdefault(key, []).append(row)
    return [_merged(group, key[0]) for key, group in groups.items()]


def _merged(group: Sequence[ModuleRow], pattern: str) -> ShownModule:
    row = group[0]
    if len(group) > 1:
        forward, backward = _worst([one.forward for one in group]), _worst([one.backward for one in group])
        share = sum(one.share for one in group)
        row = replace(row, module=pattern, share=share, forward=forward, backward=backward)
    return ShownModule(row, tuple(one.module for one in group))


def _worst(found: Sequence[Numbers | None]) -> Numbers | None:
    known = [one for one in found if one is not None]
    if not known:
        return None
    bits = min((one.headroom_bits for one in known if one.headroom_bits is not None), default=None)
    return replace(known[0], headroom_bits=bits, underflow=max(one.underflow for one in known))


def _table(lines: Sequence[ShownModule], console: Console, asked: str) -> Table:
    table = ruled_table(console)
    values, wide = any(line.row.forward for line in lines), console.width >= _WIDE
    table.add_column("module", overflow="fold")
    for title in ("stored", "computed", "kept"):
        table.add_column(title, no_wrap=True)
    titles = ["work"]
    if values:
        titles += ["headroom", "vanish", "gradients\nheadroom", "gradients\nvanish"] if wide else ["headroom", "vanish"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        row = line.row
        cells = _numbers(row.forward, row.backward, wide) if values else []
        table.add_row(_name(line), _formats(row.stored), _computed(row, asked), _formats(row.saved), _share(row.share),
                      *cells)  # fmt: skip
    return table


def _name(line: ShownModule) -> Text:
    row = line.row
    name = Text(printable(row.module))
    if len(line.names) > 1:
        kind = f" {row.kind}" if row.module.endswith("*") else ""
        name.append(printable(f"{kind} x{len(line.names)}"), style="dim")
    return name.append(" (island)", style="cyan") if row.island == row.module else name


def _computed(row: ModuleRow, asked: str) -> Text:
    if not row.computed:
        return Text("-", style="dim")
    name, share = next(iter(row.computed.items()))
    words = name if share >= _MIXED else f"{name} {share:.0%}"
    # Work in another format than asked for, and in no island: probably unintended.
    stray = bool(row.flops) and name != asked and row.island is None
    return Text(words, style="yellow" if stray else "cyan" if row.island is not None else "")


def _formats(sizes: Mapping[str, int]) -> str:
    names = [name for name, _ in sorted(sizes.items(), key=lambda item: -item[1])]
    return "+".join(names[:2]) if names else "-"


def _numbers(forward: Numbers | None, backward: Numbers | None, wide: bool) -> list[Text]:
    cells = [_bits(forward), _vanish(forward)]
    return [*cells, _bits(backward), _vanish(backward)] if wide else cells


def _bits(numbers: Numbers | None) -> Text:
    if numbers is None or numbers.headroom_bits is None:
        return Text("-", style="dim")
    # Adding 0.0 turns -0.0 into 0.0.
    bits = numbers.headroom_bits + 0.0
    return Text(f"{bits:.1f} bits", style="red" if bits < 0 else "yellow" if bits < _FEW_BITS else "")


def _vanish(numbers: Numbers | None) -> Text:
    return Text(_share(numbers.underflow) if numbers else "-")


def _share(share: float) -> str:
    if not share:
        return "-"
    # 99.95 % and above must not be rounded to 100 %, which means all of it.
    return f"{share if share == 1 else min(share, 0.999):.1%}" if share >= 0.001 else "<0.1%"


def _print_islands(console: Console, islands: Sequence[IslandVerdict]) -> None:
    if not islands:
        return
    heading(console, "Islands", "the same step without each of them")
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=34, overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in islands:
        needed = {True: ("needed", "green"), False: ("not needed", "yellow"), None: ("unknown", "dim")}
        path = one.path or "(the model itself)"
        table.add_row(Text(printable(path)), Text(*needed[one.needed]), Text(printable(one.why)))
    console.print(indented(table))
