"""Draw charts as SVG: in an HTML figure, or as a separate file.

Curves have a fixed size that suits a phone; on a wide screen charts stand next to each other instead of growing. Bars,
intervals and trees are laid out in percent of the width, and their text keeps its size.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import groupby
from pathlib import Path

from halfstep.draw.axis import Axis, format_tick
from halfstep.draw.thinning import thin_curve_points
from halfstep.errors import WrongUse
from halfstep.files import write_text
from halfstep.page import Bars, Chart, Curve, Curves, Interval, Intervals, Tree, TreeNode, is_drawable
from halfstep.printable import escape_unprintable, truncate_text

WIDTH, HEIGHT = 360.0, 214.0
LEFT, RIGHT, TOP, BOTTOM = 72.0, 8.0, 10.0, 38.0
BINS = 150
"""Spans of a curve; each keeps its least and largest number."""
HOVERS = 60
"""Columns with their own text on hover."""
MARKS = 90
"""Skips that can be distinguished."""
FEW = 40
"""Points up to which each gets a dot."""
DEEPEST, MOST_BLOCKS, NARROWEST = 12, 600, 0.0015
"""Levels and blocks of a tree, and the least share of the width that a block is drawn with."""
BAR, ROW, LEVEL = 22, 24, 26
COLORS = 8


@dataclass(frozen=True)
class FigureRow:
    """One drawing of a figure: the inside of an `svg` element, and text above it."""

    inside: str
    height: float
    label: str
    """Says the same to those who cannot see it."""
    name: str = ""
    words: str = ""
    width: float | None = None
    """None if places are in percent of the width."""


@dataclass(frozen=True)
class ChartFigure:
    """A chart that is laid out."""

    title: str
    unit: str
    rows: list[FigureRow]
    legend: list[tuple[str, str]]
    """Drawings of 22 by 11, and what each means."""


def escape_svg(text: object) -> str:
    """Return text for HTML and SVG, with control characters made visible."""
    return escape(escape_unprintable(text))


def format_css_class(text: str) -> str:
    """Return a text as part of a class: letters and digits only."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())


def lay_out_chart(chart: Chart) -> ChartFigure:
    """Lay out a chart that is not empty."""
    if isinstance(chart, Curves):
        return _lay_out_curves(chart)
    if isinstance(chart, Bars):
        return _lay_out_bars(chart)
    return _lay_out_intervals(chart) if isinstance(chart, Intervals) else _lay_out_tree(chart)


Points = tuple[Curve, list[float], list[float]]


def _lay_out_curves(chart: Curves) -> ChartFigure:
    thinned = [(curve, *thin_curve_points(curve.x, curve.y, BINS)) for curve in chart.curves]
    points = [found for found in thinned if found[1]]
    last = max([*(x[-1] for _, x, _ in points), *(at for at, _ in chart.skips), 1.0])
    # From zero, the start of a run, even if its first steps are not in the journal.
    across, axis = Axis(0.0, last), Axis.fitting([value for *_, y in points for value in y], chart.scale)
    marks = _draw_skip_marks(chart.skips, across)
    inside = [
        *_draw_axes(chart, across, axis),
        *(line for found in points for line in _draw_curve_line(found, across, axis)),
    ]
    inside += [*_draw_hover_columns(points, across, chart), *marks]
    names = ", ".join(curve.name for curve, *_ in points)
    label = f"{chart.title}: {names}" + (f", {len(marks)} marks of skipped steps" if marks else "")
    legend = (
        [
            (f'<line x1="1" y1="5" x2="21" y2="5" class="{_name_line_classes(curve)}"/>', curve.name)
            for curve, *_ in points
        ]
        if len(points) > 1
        else []
    )
    if marks:
        legend.append(('<path class="skip" d="M11 1 15.5 9H6.5z"/>', "skipped step"))
    return ChartFigure(chart.title, "", [FigureRow("\n".join(inside), HEIGHT, label, width=WIDTH)], legend)


def _name_line_classes(curve: Curve) -> str:
    return f"line s{curve.color % COLORS}" + (" dashed" if curve.dashed else "") + (" faint" if curve.faint else "")


def _draw_axes(chart: Curves, across: Axis, axis: Axis) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in axis.ticks(5):
        at = _compute_y(axis.share(tick))
        yield (
            f'<line class="gridline" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
            f'<text x="{LEFT - 6}" y="{round(at + 4, 1)}" text-anchor="end">{escape_svg(axis.label(tick))}</text>'
        )
    yield f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    for tick in across.ticks(5, whole=True):
        at = _compute_x(across.share(tick))
        anchor = "end" if at > right - 12 else "middle"
        yield f'<text x="{at}" y="{bottom + 16}" text-anchor="{anchor}">{escape_svg(format_tick(tick))}</text>'
    middle = (TOP + bottom) / 2
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape_svg(chart.x_title)}</text>'
    y_title = escape_svg(truncate_text(chart.y_title, 32))
    yield f'<text transform="translate(10 {middle}) rotate(-90)" text-anchor="middle">{y_title}</text>'


def _draw_curve_line(found: Points, across: Axis, axis: Axis) -> Iterator[str]:
    curve, x, y = found
    places = [(_compute_x(across.share(a)), _compute_y(axis.share(b))) for a, b in zip(x, y, strict=True)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    yield f'<polyline class="{_name_line_classes(curve)}" points="{points}"/>'
    if len(places) <= FEW:
        yield "".join(f'<circle class="f{curve.color % COLORS}" cx="{a}" cy="{b}" r="2.2"/>' for a, b in places)


def _compute_x(share: float) -> float:
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _compute_y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _draw_skip_marks(skips: Sequence[tuple[float, str]], across: Axis) -> list[str]:
    """Return a mark for every place of the axis with skips, with their steps and reasons."""
    places: dict[int, list[tuple[float, str]]] = {}
    for at, reason in skips:
        places.setdefault(int(across.share(at) * MARKS), []).append((at, reason))
    top = HEIGHT - BOTTOM - 10
    return [
        f'<path class="skip" d="M{_compute_x(across.share(found[0][0]))} {top}l4.5 8h-9z">'
        f"<title>{escape_svg(_describe_skip(found))}</title></path>"
        for found in places.values()
    ]


def _describe_skip(found: list[tuple[float, str]]) -> str:
    reasons = Counter(reason.replace("_", " ") for _, reason in found)
    words = ", ".join(reason if count == 1 else f"{count:,} × {reason}" for reason, count in reasons.most_common(4))
    first, last = found[0][0], found[-1][0]
    return f"step {first:,.0f} skipped: {words}" if first == last else f"steps {first:,.0f} to {last:,.0f}: {words}"


def _draw_hover_columns(points: list[Points], across: Axis, chart: Curves) -> Iterator[str]:
    """Yield columns over the whole chart, each with the numbers of all curves there."""
    xs = sorted({at for _, x, _ in points for at in x})
    if len(xs) > HOVERS:
        xs = [xs[n * (len(xs) - 1) // (HOVERS - 1)] for n in range(HOVERS)]
    places = [_compute_x(across.share(at)) for at in xs]
    edges = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(places)), WIDTH - RIGHT]
    height = HEIGHT - TOP - BOTTOM
    # The axis title has the plural of the counted unit.
    x_name = chart.x_title.removeprefix("attempted ").removesuffix("s")
    for n, at in enumerate(xs):
        words = "; ".join(
            f"{curve.name} {chart.form(y[max(bisect_right(x, at) - 1, 0)])}" for curve, x, y in points if x[0] <= at
        )
        left, right = round(edges[n], 1), round(edges[n + 1], 1)
        yield (
            f'<g class="hover"><title>{escape_svg(f"{x_name} {at:,.0f}: {words}")}</title><rect x="{left}" y="{TOP}" '
            f'width="{round(right - left, 1)}" height="{height}"/><line x1="{places[n]}" x2="{places[n]}" y1="{TOP}" '
            f'y2="{TOP + height}"/></g>'
        )


def _lay_out_bars(chart: Bars) -> ChartFigure:
    rows, most = [], chart.axis_length
    for bar in chart.bars:
        inside, left = [], 0.0
        for piece in bar.pieces:
            width = 100 * piece.size / most
            inside.append(
                f'<rect class="piece p-other p-{format_css_class(piece.kind)}" x="{round(left, 3)}%" '
                f'width="{round(width, 3)}%" height="{BAR}">'
                f"<title>{escape_svg(piece.words or bar.words)}</title></rect>"
            )
            left += width
        rows.append(FigureRow("".join(inside), BAR, f"{bar.name}: {bar.words}", bar.name, bar.words))
    kinds = dict.fromkeys(piece.kind for bar in chart.bars for piece in bar.pieces)
    legend = [(_draw_legend_square(kind), kind) for kind in kinds] if len(kinds) > 1 else []
    return ChartFigure(chart.title, chart.unit, rows, legend)


def _draw_legend_square(kind: str) -> str:
    return f'<rect class="p-other p-{format_css_class(kind)}" x="5" width="11" height="11" rx="2"/>'


def _lay_out_intervals(chart: Intervals) -> ChartFigure:
    known = [row for row in chart.rows if is_drawable(row.at)]
    ends = [end for row in known for end in (row.low, row.at, row.high) if is_drawable(end)]
    low, high = chart.reference - chart.margin, chart.reference + chart.margin
    axis = Axis.fitting([*ends, low, high, chart.reference])
    left, right, zero = (_compute_percent_place(axis, at) for at in (low, high, chart.reference))
    band = f'<rect class="band" x="{left}%" width="{round(right - left, 2)}%" height="{ROW}"/>' if chart.margin else ""
    behind = f'{band}<line class="zero" x1="{zero}%" x2="{zero}%" y1="0" y2="{ROW}"/>'
    rows = [_lay_out_interval(row, axis, behind) for row in known]
    ticks = "".join(
        f'<text x="{_compute_percent_place(axis, at)}%" y="13" text-anchor="middle">{escape_svg(axis.label(at))}</text>'
        for at in axis.ticks(5)
    )
    title = f'<text x="50%" y="29" text-anchor="middle">{escape_svg(chart.unit)}</text>'
    legend = [("", chart.legend)] if chart.legend else []
    if chart.margin:
        words = f"within the margin, ± {format_tick(chart.margin)}"
        legend.insert(0, ('<rect class="band" x="3" width="16" height="11"/>', words))
    return ChartFigure(chart.title, "", [*rows, FigureRow(ticks + title, 34, "")], legend)


def _lay_out_interval(row: Interval, axis: Axis, behind: str) -> FigureRow:
    has_ends = is_drawable(row.low) and is_drawable(row.high)
    low, high = (
        (_compute_percent_place(axis, row.low), _compute_percent_place(axis, row.high))
        if has_ends
        else (_compute_percent_place(axis, row.at),) * 2
    )
    said = f"{row.name}: {row.words}, {row.verdict}"
    style = f"tone-{row.tone or 'warn'}"
    inside = (
        f"<title>{escape_svg(said)}</title>{behind}"
        f'<line class="reach {style}" x1="{low}%" x2="{high}%" y1="12" y2="12"/>'
        f'<circle class="{style}" cx="{_compute_percent_place(axis, row.at)}%" cy="12" r="5"/>'
    )
    return FigureRow(inside, ROW, said, row.name, f"{row.words} · {row.verdict}")


def _compute_percent_place(axis: Axis, value: float) -> float:
    return round(3 + 94 * axis.share(value), 2)


def _lay_out_tree(chart: Tree) -> ChartFigure:
    levels = min(count_tree_levels(chart.root), DEEPEST)
    blocks = itertools.islice(iterate_placed_nodes(chart.root, 0.0, 1.0, 0, levels), MOST_BLOCKS)
    inside = "\n".join(_draw_tree_block(*block) for block in blocks)
    legend = [(_draw_legend_square(kind), f"{kind} {words}") for kind, words in chart.legend]
    if chart.outline:
        legend.append(('<rect class="island" x="5" y="1" width="11" height="9"/>', chart.outline))
    return ChartFigure(chart.title, chart.unit, [FigureRow(inside, levels * LEVEL, chart.title)], legend)


def count_tree_levels(node: TreeNode) -> int:
    """Return the levels of nodes that have a size."""
    return 1 + max((count_tree_levels(child) for child in node.children if child.total), default=0)


def iterate_placed_nodes(
    node: TreeNode, left: float, width: float, level: int, levels: int
) -> Iterator[tuple[TreeNode, float, float, int]]:
    """Yield each node with its place: parents above children, each as wide as its share."""
    yield node, left, width, level
    # Deeper nodes appear in the colors of their parents.
    if level + 1 == levels:
        return
    for child in node.children:
        part = width * child.total / node.total if node.total else 0.0
        if part >= NARROWEST:
            yield from iterate_placed_nodes(child, left, part, level + 1, levels)
        left += part


def _draw_tree_block(node: TreeNode, left: float, width: float, level: int) -> str:
    inside, at = [], 0.0
    for kind, stripe in groupby(node.stripes(), key=lambda one: one[0]):
        part = 100 * sum(size for _, size in stripe) / node.total
        color = f"piece p-other p-{format_css_class(kind)}"
        inside.append(f'<rect class="{color}" x="{round(at, 3)}%" width="{round(part, 3)}%" height="{LEVEL - 1}"/>')
        at += part
    frame = "island" if node.outlined else "frame"
    inside.append(f'<rect class="{frame}" width="100%" height="{LEVEL - 1}"/>')
    if width > 0.025:
        inside.append(f'<text class="on" x="6" y="17">{escape_svg(truncate_text(node.name, int(width * 150)))}</text>')
    return (
        f'<svg x="{round(100 * left, 3)}%" y="{level * LEVEL}" width="{round(100 * width, 3)}%" height="{LEVEL - 1}">'
        f"<title>{escape_svg(node.words or node.name)}</title>{''.join(inside)}</svg>"
    )


_FILE_WIDTH, _GAP, _PAD, _LINE, _LETTER = 380.0, 16.0, 14.0, 18.0, 6.2


def check_svg_path(path: Path, option: str) -> None:
    """Raise `WrongUse` unless a chart can be written to the path: an .svg file in a folder that exists."""
    if path.suffix.lower() != ".svg" or not path.absolute().parent.is_dir():
        do = f"{option} {path.with_suffix('.svg') if path.absolute().parent.is_dir() else 'formats.svg'}"
        raise WrongUse(f"{option} {path}", allowed="an .svg file in a folder that exists: charts are SVG", do=do)


def write_svg(charts: Sequence[Chart], path: Path, title: str = "") -> None:
    """Write charts that are not empty as one SVG file; an existing file is replaced when the new one is complete."""
    write_text(path, render_svg_document(charts, title))


def render_svg_document(charts: Sequence[Chart], title: str = "") -> str:
    """Return one SVG document with trees first, and other charts in rows of two or three; it says where it has none."""
    drawn = [chart for chart in charts if not chart.is_empty]
    trees = [lay_out_chart(chart) for chart in drawn if isinstance(chart, Tree)]
    small = [lay_out_chart(chart) for chart in drawn if not isinstance(chart, Tree)]
    in_row = 3 if trees or len(small) not in (1, 2, 4) else min(len(small), 2)
    width = in_row * (_FILE_WIDTH + _GAP) - _GAP
    rows = [([tree], width) for tree in trees]
    rows += [(small[begin : begin + in_row], _FILE_WIDTH) for begin in range(0, len(small), in_row)]
    y = _PAD + (_LINE + 6 if title else 0.0)
    inside = [
        f'<text class="strong" x="{_PAD}" y="{_PAD + 12}">{escape_svg(truncate_text(title, int(width / 7)))}</text>'
    ]
    for figures, each in rows:
        found = [_draw_figure(figure, each) for figure in figures]
        for n, (drawing, height) in enumerate(found):
            x = _PAD + n * (each + _GAP)
            inside.append(f'<svg x="{x}" y="{y}" width="{each}" height="{height}">{drawing}</svg>')
        y += max(height for _, height in found) + _GAP
    if not drawn:
        inside.append(f'<text x="{_PAD}" y="{y + 14}">no finite numbers</text>')
        y += 2 * _LINE
    width += 2 * _PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}">'
        f'<style>{_build_file_style()}</style><rect class="card" width="100%" height="100%"/>'
        + "\n".join(inside)
        + "</svg>\n"
    )


def _draw_figure(figure: ChartFigure, width: float) -> tuple[str, float]:
    """Return a figure with its title and legend as the inside of an `svg` element, and its height."""
    unit = f'<tspan class="unit" dx="8">{escape_svg(figure.unit)}</tspan>' if figure.unit else ""
    lines = [
        f'<text class="strong" x="0" y="13">{escape_svg(truncate_text(figure.title, int(width / 7)))}{unit}</text>'
    ]
    x, y = 0.0, _LINE
    for swatch, words in figure.legend:
        taken = (28 if swatch else 0) + len(words) * _LETTER + 12
        if x and x + taken > width:
            x, y = 0.0, y + _LINE
        lines.append(
            f'<g transform="translate({x} {y})"><g transform="translate(0 3)">{swatch}</g>'
            f'<text x="{26 if swatch else 0}" y="13">{escape_svg(words)}</text></g>'
        )
        x += taken
    y += _LINE if figure.legend else 0.0
    for row in figure.rows:
        if row.name or row.words:
            most = max(int(width / _LETTER) - len(row.words) - 2, 8)
            lines.append(f'<text class="dark" x="0" y="{y + 13}">{escape_svg(truncate_text(row.name, most))}</text>')
            lines.append(
                f'<text class="dark" x="{width}" y="{y + 13}" text-anchor="end">{escape_svg(row.words)}</text>'
            )
            y += _LINE
        scaled = f' viewBox="0 0 {row.width} {row.height}"' if row.width else ""
        height = row.height * width / row.width if row.width else row.height
        lines.append(f'<svg y="{y}" width="{width}" height="{height}"{scaled}>{row.inside}</svg>')
        y += height + 6
    return "\n".join(lines), y


@lru_cache(maxsize=1)
def _build_file_style() -> str:
    """Return the style of charts with every variable replaced by its color: many viewers know no variables."""
    found = read_chart_style()
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): *(#[0-9a-f]+)", part)) for part in found.split("/* dark */"))
    rules = found.split("/* rules */")[1]

    def resolve_colors(colors: dict[str, str]) -> str:
        return re.sub(r"var\(--([a-z0-9-]+)\)", lambda match: colors.get(match[1]) or light[match[1]], rules)

    return f"{resolve_colors(light)}@media (prefers-color-scheme: dark) {{{resolve_colors(dark)}}}"


@lru_cache(maxsize=1)
def read_chart_style() -> str:
    """Return the style sheet of charts, with colors for a light and a dark screen."""
    return Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
