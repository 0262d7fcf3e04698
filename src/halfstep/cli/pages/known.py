"""Print tables of what is known: number formats, GPUs, and what is bad in the installed libraries."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, pairs, print_finding, ruled_table
from halfstep.terminal import screen

_SHOWN = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
_FOR_AND_AGAINST = {
    "bf16": (
        "fp32's range: what overflows in fp16 does not here, and small gradients stay above zero",
        "no loss scale, so nothing is skipped while one is searched for",
        "native from Ampere on (compute capability 8.0), on AMX and AVX512-BF16, on AMD's CDNA and RDNA 3",
        "against it: two digits; sums and weights stay in fp32, or small updates are lost",
    ),
    "fp16": (
        "one digit more than bf16",
        "native from Volta and Turing on (compute capability 7.0), where bf16 is emulated",
        "against it: above 65504 is infinity, below 6e-08 is zero; it needs a loss scale, which moves by itself",
        "against it: values that a model never had in training may overflow later",
    ),
}


def format_rows() -> list[dict[str, Any]]:
    """Return the figures of each format, all queried from torch."""
    from halfstep.formats import FORMATS

    return [
        {
            "name": name,
            "bits": FORMATS[name].bits,
            "sign": 1,
            "exponent": FORMATS[name].exponent_bits,
            "fraction": FORMATS[name].fraction_bits,
            "largest": FORMATS[name].largest,
            "smallest": FORMATS[name].smallest,
            "digits": FORMATS[name].decimal_digits,
            "counts_to": FORMATS[name].largest_exact_integer,
            "notes": list(_FOR_AND_AGAINST.get(name, ())),
        }
        for name in _SHOWN
    ]


def gpu_rows() -> list[dict[str, Any]]:
    """Return the known devices with the precision a run would choose by rule; nothing is measured."""
    from halfstep.measure.memory.devices import device_ids, device_named
    from halfstep.precision.select import choose_precision

    rows = []
    for name in device_ids():
        target = device_named(name)
        choice = choose_precision(device=target.device)
        rows.append(
            {
                "id": name,
                "name": target.device.name,
                "gib": target.memory / 2**30,
                "native": [kind for kind in ("tf32", "bf16", "fp16", "fp8") if target.ability(kind).native],
                "precision": choice.precision.name,
                # Where it is fp32: why not even fp16.
                "why": target.ability("fp16").reason if choice.precision.name == "fp32" else choice.rungs[-1].reason,
            }
        )
    return rows


def show(report: dict[str, Any]) -> None:
    """Print the requested tables."""
    console = screen()
    if "formats" in report:
        _show_formats(report["formats"], console)
    if "gpus" in report:
        heading(console, "GPUs", "what auto takes without measuring; halfstep estimate RECIPE --device NAME for memory")
        console.print(_gpus(report["gpus"], console))
    if "known_bad" in report:
        heading(console, "Known to be bad", "in the versions that are installed here")
        for finding in report["known_bad"]:
            print_finding(console, finding)


def _show_formats(rows: list[dict[str, Any]], console: Console) -> None:
    heading(console, "Formats", "sign, exponent, fraction")
    table = _table(console, "format", "bits", "s", "e", "f", "range", "above zero", "digits", "counts to")
    for row in rows:
        cells = (row["bits"], row["sign"], row["exponent"], row["fraction"], f"±{row['largest']:.5g}")
        table.add_row(
            row["name"], *map(str, cells), f"{row['smallest']:.1g}", str(row["digits"] or "<1"), f"{row['counts_to']:,}"
        )
    console.print(table)
    console.print()
    for row in rows:
        console.print(indented(_bits(row)))
    for row in rows:
        if row["notes"]:
            heading(console, row["name"])
            for note in row["notes"]:
                console.print(indented(Text(note)))
    heading(console, "Mixed precision")
    console.print(
        pairs(
            {
                "16 bits": "products and convolutions, forward and backward, and what they keep for backward",
                "fp32": "weights, optimizer state, losses, norms of gradients, sums over processes",
            }
        )
    )


def _bits(row: dict[str, Any]) -> Text:
    """Return one letter per bit, so that formats can be compared below each other."""
    text = Text(f"{row['name']:<9}", style="dim")
    text.append("s", style="bold").append("e" * row["exponent"], style="cyan")
    return text.append("f" * row["fraction"], style="green")


def _gpus(rows: list[dict[str, Any]], console: Console) -> Table:
    table = _table(console, "--device", "GPU", "memory", "native", "choose")
    for row in rows:
        native = " ".join(row["native"]) or "-"
        table.add_row(row["id"], row["name"], f"{row['gib']:.0f} GiB", native, Text(row["precision"], style="green"))
    return table


def _table(console: Console, *titles: str) -> Table:
    table = ruled_table(console)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title in ("format", "--device", "choose", "memory"))
    return table
