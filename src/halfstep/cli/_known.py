"""Tables of known facts: number formats, GPUs, and defects of the installed libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from halfstep.doctor.located import build_located_box
from halfstep.finding import Finding
from halfstep.page import Block, Column, Heading, Items, Page, Pairs, Span, Table, Text

_SHOWN = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
_FOR_AND_AGAINST = {
    "bf16": (
        "fp32's range: what overflows in fp16 does not here, and small gradients stay above zero",
        "no loss scale, so no steps are skipped to find one",
        "native from Ampere on (compute capability 8.0), on AMX and AVX512-BF16, on AMD's CDNA and RDNA 3",
        "drawback: two digits; sums and weights stay in fp32, or small updates are lost",
    ),
    "fp16": (
        "one digit more than bf16",
        "native from Volta and Turing on (compute capability 7.0), where bf16 is emulated",
        "drawback: above 65504 is infinity, below 6e-08 is zero; it needs a loss scale, which adjusts itself",
        "drawback: values that a model never had in training may overflow later",
    ),
}


@dataclass(frozen=True)
class FormatRow:
    """The figures of a number format."""

    name: str
    bits: int
    sign: int
    exponent: int
    fraction: int
    largest: float
    smallest: float
    digits: int
    """Decimal digits."""
    counts_to: int
    """The largest integer up to which all integers are exact."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class GpuRow:
    """A known GPU, and the precision that a run would choose on it."""

    id: str
    name: str
    gib: float
    native: tuple[str, ...]
    precision: str
    why: str


def build_format_rows() -> list[FormatRow]:
    """Return the figures of each format, all queried from torch."""
    from halfstep.formats import FORMATS

    rows = []
    for name in _SHOWN:
        known = FORMATS[name]
        figures = (known.bits, 1, known.exponent_bits, known.fraction_bits, known.largest, known.smallest)
        notes = _FOR_AND_AGAINST.get(name, ())
        rows.append(FormatRow(name, *figures, known.decimal_digits, known.largest_exact_integer, notes))
    return rows


def build_gpu_rows() -> list[GpuRow]:
    """Return the known devices with the precision a run would choose by rule; nothing is measured."""
    from halfstep.measure.memory.devices import device_named, list_device_ids
    from halfstep.precision.select import choose_precision

    rows = []
    for id in list_device_ids():
        target = device_named(id)
        choice = choose_precision(device=target.device)
        native = tuple(kind for kind in ("tf32", "bf16", "fp16", "fp8") if target.ability(kind).native)
        precision = choice.precision.name
        # Where it is fp32: why not even fp16.
        why = target.ability("fp16").reason if precision == "fp32" else choice.rungs[-1].reason
        rows.append(GpuRow(id, target.device.name, target.memory / 2**30, native, precision, why))
    return rows


def build_known_page(
    formats: Sequence[FormatRow] | None, gpus: Sequence[GpuRow] | None, known_bad: Sequence[Finding] | None
) -> Page:
    """Return the page of the requested tables."""
    blocks: list[Block] = []
    if formats is not None:
        blocks += _build_format_blocks(formats)
    if gpus is not None:
        aside = (
            "auto's choice without measuring; for the memory of a recipe, run halfstep estimate RECIPE --device NAME"
        )
        cells = [
            (row.id, row.name, f"{row.gib:.0f} GiB", " ".join(row.native) or "-", Span(row.precision, "good"))
            for row in gpus
        ]
        blocks += [Heading("GPUs", aside), _build_facts_table(("--device", "GPU", "memory", "native", "choose"), cells)]
    if known_bad is not None:
        blocks += [
            Heading("Known to be bad", "in the versions that are installed here"),
            *map(build_located_box, known_bad),
        ]
    return Page("number formats, GPUs and libraries", tuple(blocks))


def _build_format_blocks(rows: Sequence[FormatRow]) -> Iterator[Block]:
    yield Heading("Formats", "sign, exponent, fraction")
    cells = []
    for row in rows:
        figures = (row.bits, row.sign, row.exponent, row.fraction, f"±{row.largest:.5g}", f"{row.smallest:.1g}")
        cells.append((row.name, *map(str, figures), str(row.digits or "<1"), f"{row.counts_to:,}"))
    yield _build_facts_table(("format", "bits", "s", "e", "f", "range", "above zero", "digits", "counts to"), cells)
    yield Items(tuple(map(_format_bit_letters, rows)), gap=True)
    for row in rows:
        if row.notes:
            yield Heading(row.name)
            yield Items(row.notes)
    yield Heading("Mixed precision")
    yield Pairs(
        (
            ("16 bits", "products and convolutions, forward and backward, and the tensors they save for backward"),
            ("fp32", "weights, optimizer state, losses, norms of gradients, sums over processes"),
        )
    )


def _format_bit_letters(row: FormatRow) -> Text:
    """Return one letter per bit, so that formats can be compared below each other."""
    letters = (Span("s", strong=True), Span("e" * row.exponent, "note"), Span("f" * row.fraction, "good"))
    return (Span(f"{row.name:<9}", "dim"), *letters)


def _build_facts_table(titles: Sequence[str], rows: Iterable[tuple[Text, ...]]) -> Table:
    unbroken = ("format", "--device", "choose", "memory")
    columns = (Column(title, wrap="never" if title in unbroken else "fold") for title in titles)
    return Table(tuple(columns), tuple(rows))
