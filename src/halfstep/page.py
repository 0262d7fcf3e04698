"""A page about a result: headings, text, tables and charts, as data.

A result builds its page once, with a method `page()`. `halfstep.draw` has the renderers: `terminal` (rich), `html`,
`markdown` and `notebook` (`_repr_html_`). All text here is plain: renderers escape it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

Style = Literal["", "dim", "code", "note", "good", "warn", "bad"]


@dataclass(frozen=True)
class Span:
    """Text in one style."""

    text: str
    style: Style = ""
    strong: bool = False


Text: TypeAlias = str | Span | tuple[str | Span, ...]
"""Text of any block or cell: a string, a styled span, or several of both."""


def convert_to_spans(text: Text) -> list[Span]:
    """Return the text as spans."""
    parts = text if isinstance(text, tuple) else (text,)
    return [part if isinstance(part, Span) else Span(part) for part in parts]


def strip_styles(text: Text) -> str:
    """Return the text without its styles."""
    return "".join(span.text for span in convert_to_spans(text))


@dataclass(frozen=True)
class Heading:
    """The title of a section, with an optional remark."""

    text: str
    aside: str = ""
    level: Literal[2, 3] = 2


@dataclass(frozen=True)
class Paragraph:
    """One paragraph; line breaks in it are kept."""

    text: Text
    indent: bool = False
    """Indent it on the terminal."""
    gap: bool = False
    """Print an empty line above it on the terminal."""
    wrap: bool = True
    """Wrap it on the terminal; a path to copy is not wrapped."""


@dataclass(frozen=True)
class Items:
    """A list of short texts."""

    rows: tuple[Text, ...]
    indent: int = 2
    """Terminal columns by which it is indented outside of a box."""
    gap: bool = False
    """Print an empty line above it on the terminal."""
    wrap: bool = True
    """Wrap it on the terminal; paths to copy are not wrapped."""
    dashes: bool = False
    """Print a dash before each on the terminal, with wrapped lines below the first word."""


@dataclass(frozen=True)
class Code:
    """Lines to copy as they are, such as a patch or a program."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Instruction:
    """A command to type, or an instruction: in HTML a separate box."""

    text: str
    lead: str = "  $ "
    """Printed before it on the terminal."""
    gap: bool = False
    """Print an empty line above it on the terminal."""
    is_prose: bool = False
    """Whether it is read rather than copied: the terminal wraps it and prints it plain."""


@dataclass(frozen=True)
class Pairs:
    """Names with their values."""

    rows: tuple[tuple[str, Text], ...]
    widest: int | None = None
    """Terminal columns at which a name is folded."""
    chips: bool = False
    """Show them as a row of small labels in HTML."""
    gap: bool = False
    """Print an empty line above them on the terminal."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str = ""
    align: Literal["left", "right"] = "left"
    wrap: Literal["words", "fold", "never", "cut"] = "words"
    """How the terminal breaks long cells: between words, anywhere, not at all, or with an ellipsis for the rest."""
    widest: int | None = None
    """Terminal columns at most."""
    left_out: int = 0
    """A narrow terminal leaves out columns in this order, 1 first; it never leaves out those with 0."""
    terminal: Literal["always", "wide", "second", "never"] = "always"
    """Where the terminal shows it: always, from 100 columns on, in a second table headed `More`, or never."""


@dataclass(frozen=True)
class Table:
    """A table; without any column title it has no head. An empty row is a line between sections."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Text, ...], ...]
    indent: int | None = None
    """Terminal columns by which it is indented; None means not with titles, and by 2 without."""
    gap: bool = False
    """Print an empty line above it on the terminal."""


def build_number_table(first: str, titles: Sequence[str], rows: Sequence[tuple[Text, ...]]) -> Table:
    """Return a table with names in its first column, and numbers below each of the titles."""
    columns = (Column(first, wrap="fold"), *(Column(title, "right") for title in titles))
    return Table(columns, tuple(rows), indent=1)


@dataclass(frozen=True)
class Box:
    """Blocks that belong together below a title, such as a finding or an incident."""

    title: Text
    blocks: tuple[Block, ...] = ()
    tone: Style = ""


@dataclass(frozen=True)
class Details:
    """Blocks that a reader opens on request, where a renderer can hide them."""

    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class SideBySide:
    """Groups of blocks next to each other, where there is room."""

    parts: tuple[tuple[Block, ...], ...]


@dataclass(frozen=True)
class Picture:
    """An image of pixels, as the bytes of its file."""

    caption: str
    data: bytes
    format: Literal["png", "jpeg"]
    width: int
    height: int
    alt: str = ""


@dataclass(frozen=True)
class Pictures:
    """Images next to each other."""

    pictures: tuple[Picture, ...]


LARGEST = 1e300
"""Larger numbers are not drawn: an axis adds margins to its data, which must stay finite."""


def is_drawable(value: float) -> bool:
    """Return whether a chart has a place for the number: neither NaN nor infinite, nor near it."""
    return math.isfinite(value) and abs(value) < LARGEST


def format_short_number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class Curve:
    """A named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    color: int = 0
    """Index of its color in the palette."""
    faint: bool = False


@dataclass(frozen=True)
class Curves:
    """Curves over a common axis."""

    title: str
    curves: tuple[Curve, ...]
    x_title: str = "attempted steps"
    y_title: str = ""
    scale: Literal["auto", "linear", "zero", "share", "log2"] = "auto"
    """`auto` is logarithmic if a spike would flatten the rest; `zero` starts at zero; `share` is linear from 0 to 1,
    and further where a number is outside."""
    skips: Sequence[tuple[float, str]] = ()
    """Skipped steps and their reasons."""
    form: Callable[[float], str] = format_short_number
    """Formats the numbers of the hover text."""

    @property
    def is_empty(self) -> bool:
        return not any(is_drawable(value) for curve in self.curves for value in curve.y)


@dataclass(frozen=True)
class BarPiece:
    """A part of a bar: its kind, which is also its color, its length, and its hover text."""

    kind: str
    size: float
    words: str = ""


@dataclass(frozen=True)
class Bar:
    """A named bar of pieces; `words` is its figure."""

    name: str
    words: str
    pieces: tuple[BarPiece, ...]

    @property
    def length(self) -> float:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars on one axis that starts at zero."""

    title: str
    bars: tuple[Bar, ...]
    unit: str = ""
    whole: float | None = None
    """Length of the axis; the longest bar where it is None."""

    @property
    def is_empty(self) -> bool:
        return not any(piece.size for bar in self.bars for piece in bar.pieces)

    @property
    def axis_length(self) -> float:
        return self.whole or max(bar.length for bar in self.bars) or 1.0


@dataclass(frozen=True)
class Interval:
    """A number with its confidence interval, whose ends may be NaN, and a verdict on it."""

    name: str
    words: str
    verdict: str
    tone: Style
    low: float
    at: float
    high: float


@dataclass(frozen=True)
class Intervals:
    """Intervals on one axis, with a line at `reference` and the margin around it."""

    title: str
    rows: tuple[Interval, ...]
    unit: str
    reference: float
    margin: float = 0.0
    legend: str = ""

    @property
    def is_empty(self) -> bool:
        return not any(is_drawable(row.at) for row in self.rows)


@dataclass(frozen=True)
class TreeNode:
    """A part of a tree, such as a module: its size without its children by kind, and its hover text."""

    name: str
    words: str = ""
    sizes: Mapping[str, float] = field(default_factory=dict)
    children: tuple[TreeNode, ...] = ()
    outlined: bool = False

    @cached_property
    def total(self) -> float:
        return sum(self.sizes.values()) + sum(child.total for child in self.children)

    def stripes(self) -> Iterator[tuple[str, float]]:
        """Yield sizes by kind in the order in which the children are drawn."""
        for child in self.children:
            yield from child.stripes()
        yield from self.sizes.items()


@dataclass(frozen=True)
class Tree:
    """A tree as rows of blocks, the root on top, each as wide as its size and colored by kind."""

    title: str
    root: TreeNode
    unit: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    """Kinds and the label of each."""
    outline: str = ""
    """What an outline means."""

    @property
    def is_empty(self) -> bool:
        return not self.root.total


Chart: TypeAlias = Curves | Bars | Intervals | Tree


@dataclass(frozen=True)
class Charts:
    """Charts next to each other: SVG in HTML and notebooks, one linked SVG file in Markdown."""

    charts: tuple[Chart, ...]
    terminal: bool = False
    """Draw its bars on the terminal as well."""


def build_charts(*found: Chart | None) -> tuple[Charts, ...]:
    """Return one block of the charts that have something to draw; none if there is nothing."""
    drawn = tuple(chart for chart in found if chart is not None and not chart.is_empty)
    return (Charts(drawn),) if drawn else ()


Block: TypeAlias = (
    Heading | Paragraph | Items | Code | Instruction | Pairs | Table | Box | Details | SideBySide | Pictures | Charts
)


@dataclass(frozen=True)
class Page:
    """A page: its title, which the terminal leaves out, and its blocks, the answer first."""

    title: str
    blocks: tuple[Block, ...]
    aside: str = ""
    """Where it comes from, such as a folder."""

    def followed_by(self, *blocks: Block) -> Page:
        """Return the page with more blocks at its end."""
        return replace(self, blocks=(*self.blocks, *blocks))


def build_finding_box(id: str, severity: str, evidence: str, fix: str, place: str = "") -> Box:
    """Return the box of a finding: its id, its place if it has one, its evidence and its fix."""
    tone: Style = {"error": "bad", "warning": "warn"}.get(severity, "note")  # type: ignore[assignment]
    do = (Instruction(fix, "do: ", is_prose=True),) if fix else ()
    return Box((Span(f"{severity} {id}", tone), f"  {place}" if place else ""), (Paragraph(evidence), *do), tone)
