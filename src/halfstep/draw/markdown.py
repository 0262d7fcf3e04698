"""Render a page as Markdown: text and tables, with charts as a line of blocks or as links to their files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from halfstep.draw.svg import write_svg
from halfstep.draw.thinning import thin_curve_points
from halfstep.files import write_text
from halfstep.page import (
    Block,
    Box,
    Charts,
    Code,
    Curves,
    Details,
    Heading,
    Instruction,
    Items,
    Page,
    Pairs,
    Paragraph,
    Pictures,
    SideBySide,
    Span,
    Table,
    Text,
    convert_to_spans,
    strip_styles,
)  # fmt: skip
from halfstep.printable import escape_to_one_line, escape_unprintable

_SPECIAL = frozenset("\\`*_{}[]<>#|!~&$@")
"""Characters that Markdown, or GitHub's form of it, may take for markup, a mention or a formula."""
_BACKTICKS = re.compile("`+")
_BLOCKS = "▁▂▃▄▅▆▇█"


def render_markdown(page: Page, chart_files: Sequence[str] = ()) -> str:
    """Return a page as Markdown. Block n of its charts links to file n; without a file, curves are lines of blocks."""
    return "\n\n".join([f"## {escape_markdown(page.title)}", *_MarkdownWriter(chart_files).blocks(page.blocks)]) + "\n"


def write_markdown(page: Page, path: Path) -> list[Path]:
    """Write a page as Markdown, with its charts as SVG files next to it; return the paths written."""
    groups = list(_iterate_charts(page.blocks))
    files = [
        path.with_suffix(".svg") if n == 0 else path.with_name(f"{path.stem}-{n + 1}.svg") for n in range(len(groups))
    ]
    write_text(path, render_markdown(page, [file.name for file in files]))
    for group, file in zip(groups, files, strict=True):
        write_svg(group.charts, file)
    return [path, *files]


def escape_markdown(value: object) -> str:
    """Return data as Markdown shows it literally, on one line."""
    return "".join(f"\\{c}" if c in _SPECIAL else c for c in escape_to_one_line(value)).replace("://", ":\u200b//")


def draw_sparkline(values: Sequence[float], width: int = 32) -> str:
    """Return a curve as a line of blocks; empty if it has no two finite numbers."""
    _, y = thin_curve_points(range(len(values)), values, width // 2)
    y = [y[n * (len(y) - 1) // (width - 1)] for n in range(width)] if len(y) > width else y
    if len(y) < 2:
        return ""
    low, span = min(y), (max(y) - min(y)) or 1.0
    return "".join(_BLOCKS[int((value - low) / span * (len(_BLOCKS) - 1))] for value in y)


def _iterate_charts(blocks: Sequence[Block]) -> Iterator[Charts]:
    for block in blocks:
        if isinstance(block, Charts):
            yield block
        elif isinstance(block, Box | Details):
            yield from _iterate_charts(block.blocks)
        elif isinstance(block, SideBySide):
            for part in block.parts:
                yield from _iterate_charts(part)


def _render_markdown_text(text: Text) -> str:
    return "".join(map(_render_markdown_span, convert_to_spans(text)))


def _render_markdown_span(span: Span) -> str:
    if span.style == "code":
        return _render_markdown_code(span.text)
    shown = escape_markdown(span.text)
    return f"**{shown}**" if span.strong and shown.strip() == shown and shown else shown


def _render_span_lines(span: Span) -> str:
    """Return a span with its line breaks."""
    return "  \n".join(_render_markdown_span(replace(span, text=line.strip("\r"))) for line in span.text.split("\n"))


def _render_markdown_code(text: str) -> str:
    """Return a command in backticks; with characters that end them or that HTML takes for a tag, as escaped text."""
    return escape_markdown(text) if set("`<>|") & set(text) else f"`{escape_to_one_line(text)}`"


class _MarkdownWriter:
    """Blocks of one page, whose charts link to files in their order."""

    def __init__(self, chart_files: Sequence[str]) -> None:
        self._files = iter(chart_files)

    def blocks(self, blocks: Sequence[Block]) -> list[str]:
        """Return the blocks that say something."""
        return [text for block in blocks if (text := self.block(block))]

    def block(self, block: Block) -> str:
        match block:
            case Heading():
                aside = f": {escape_markdown(block.aside)}" if block.aside else ""
                return f"{'#' * (block.level + 1)} {escape_markdown(block.text)}{aside}"
            case Paragraph():
                return "".join(_render_span_lines(span) for span in convert_to_spans(block.text))
            case Items():
                return "\n".join(f"- {_render_markdown_text(row)}" for row in block.rows)
            case Code():
                fence = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(block.text)), default=0))
                return f"{fence}{block.language}\n{escape_unprintable(block.text).rstrip()}\n{fence}"
            case Instruction():
                typed = _render_span_lines(Span(block.text)) if block.is_prose else _render_markdown_code(block.text)
                return f"{escape_markdown(block.lead.strip(' $'))} {typed}".strip()
            case Pairs():
                return _render_markdown_table(
                    ["", ""], [[escape_markdown(name), _render_markdown_text(value)] for name, value in block.rows]
                )
            case Table():
                heads = [escape_markdown(column.title) for column in block.columns]
                rows = [[_render_markdown_text(cell) for cell in row] for row in block.rows if row]
                return _render_markdown_table(heads, rows, [column.align for column in block.columns])
            case Box():
                return "\n\n".join([f"**{escape_markdown(strip_styles(block.title))}**", *self.blocks(block.blocks)])
            case Details():
                inside = "\n\n".join(self.blocks(block.blocks))
                return f"<details><summary>{escape_markdown(block.summary)}</summary>\n\n{inside}\n\n</details>"
            case SideBySide():
                return "\n\n".join(text for part in block.parts for text in self.blocks(part))
            case Pictures():
                return ""
            case Charts():
                return self._charts(block)

    def _charts(self, block: Charts) -> str:
        file = next(self._files, None)
        if file is not None:
            return f"![{escape_markdown(', '.join(chart.title for chart in block.charts))}]({file.replace(' ', '%20')})"
        curves = [chart for chart in block.charts if isinstance(chart, Curves)]
        lines = [(chart.title, draw_sparkline(chart.curves[0].y)) for chart in curves if chart.curves]
        return "  \n".join(f"{escape_markdown(title)}: {line}" for title, line in lines if line)


def _render_markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], aligns: Sequence[str] = ()) -> str:
    sides = ["---:" if align == "right" else "---" for align in aligns] or ["---"] * len(heads)
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(sides)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
