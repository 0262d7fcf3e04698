"""Render a page as HTML that needs nothing else: no network, no fonts, no script. All text is escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from halfstep._version import __version__
from halfstep.draw.svg import FigureRow, escape_svg, lay_out_chart, read_chart_style
from halfstep.page import (
    Bars,
    Block,
    Box,
    Chart,
    Charts,
    Code,
    Details,
    Heading,
    Instruction,
    Items,
    Page,
    Pairs,
    Paragraph,
    Picture,
    Pictures,
    SideBySide,
    Span,
    Table,
    Text,
    Tree,
    convert_to_spans,
)  # fmt: skip

_LIGHT_THEMES = ('html[theme="light"]', 'body[data-jp-theme-light="true"]', "body.vscode-light")
_DARK_THEMES = ('html[theme="dark"]', 'body[data-jp-theme-light="false"]', "body.vscode-dark")
"""How Colab, JupyterLab and VS Code mark their theme, which need not be that of the system."""
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_CODE_WORD = re.compile(r"(?<!\S)(?=\S{1,32}(?!\S))\S*-\S+")
"""Words that stay on one line: browsers break after a hyphen. Longer ones would be wider than a phone."""
_CLASSES = {"dim": "soft", "good": "good", "warn": "warn", "bad": "bad", "note": "note"}


def render_html_document(pages: Sequence[Page], *, title: str = "", refresh: int | None = None) -> str:
    """Return pages as one document; with `refresh`, one that loads itself again after so many seconds."""
    style, rest = _build_document_style(), [content for page in pages for content in _iterate_html_parts(page)]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Allows this style by its digest, pictures within the page, and nothing else.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    again = [f'<meta http-equiv="refresh" content="{refresh:d}">'] if refresh else []
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by halfstep {__version__}."
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape_svg(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            *again,
            f"<title>{escape_svg(title or ', '.join(page.title for page in pages))}</title>",
            f"<style>{style}</style>",
            "</head>",
            '<body class="halfstep">',
            *rest,
            f"<footer>{escape_svg(made)} This page is one file: it loads nothing, and runs nothing.</footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def render_html_fragment(page: Page) -> str:
    """Return a page for a notebook's cell, with its own style, which reaches nothing outside of it."""
    return f'<div class="halfstep"><style>{_build_fragment_style()}</style>{"".join(_iterate_html_parts(page))}</div>'


def _read_style_parts() -> tuple[str, str]:
    colors, rules = read_chart_style().split("/* rules */")
    return colors, rules + Path(__file__).with_name("page.css").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _build_document_style() -> str:
    colors, rules = _read_style_parts()
    return f"{colors}{rules.replace('&.halfstep', '.halfstep')}"


@lru_cache(maxsize=1)
def _build_fragment_style() -> str:
    colors, rules = _read_style_parts()
    light, dark = (part[part.rindex("{") + 1 : part.index("}")] for part in colors.split("/* dark */"))
    themes = f":is({', '.join(_LIGHT_THEMES)}) .halfstep {{{light} color-scheme: light; }}\n"
    themes += f":is({', '.join(_DARK_THEMES)}) .halfstep {{{dark} color-scheme: dark; }}\n"
    # With the weight of an id: JupyterLab aligns cells to the right and stripes rows by rules with several classes.
    return f"{colors}{themes}:is(#halfstep, .halfstep) {{{rules.replace('&.halfstep', '&')}}}"


def _iterate_html_parts(page: Page) -> Iterator[str]:
    aside = f' <span class="soft">· {escape_svg(page.aside)}</span>' if page.aside else ""
    yield f"<header><h1>{escape_svg(page.title)}{aside}</h1>"
    blocks = list(page.blocks)
    if blocks and isinstance(blocks[0], Paragraph):
        yield f'<p class="verdict">{_render_html_text(blocks.pop(0).text)}</p>'  # type: ignore[union-attr]
    if blocks and isinstance(blocks[0], Pairs) and blocks[0].chips:
        yield _render_html_block(blocks.pop(0))
    yield "</header><main>"
    yield from map(_render_html_block, blocks)
    yield "</main>"


def _render_html_text(text: Text) -> str:
    return "".join(map(_render_html_span, convert_to_spans(text)))


def _render_html_span(span: Span) -> str:
    shown = _render_unbroken_words(span.text, _CODE_WORD if span.style == "code" else _OPTION)
    if span.style == "code":
        shown = f"<code>{shown}</code>"
    elif span.style:
        shown = f'<span class="{_CLASSES[span.style]}">{shown}</span>'
    return f"<b>{shown}</b>" if span.strong else shown


def _render_unbroken_words(text: str, words: re.Pattern[str]) -> str:
    return words.sub(r'<span class="word">\g<0></span>', escape_svg(text))


def _render_html_block(block: Block) -> str:
    match block:
        case Heading():
            aside = f" <small>{escape_svg(block.aside)}</small>" if block.aside else ""
            return f"<h{block.level}>{escape_svg(block.text)}{aside}</h{block.level}>"
        case Paragraph():
            return f"<p>{_render_html_text(block.text)}</p>"
        case Items():
            return f'<ul class="plain">{"".join(f"<li>{_render_html_text(row)}</li>" for row in block.rows)}</ul>'
        case Code():
            return f"<pre><code>{escape_svg(block.text)}</code></pre>"
        case Instruction():
            tag, words = ("span", _OPTION) if block.is_prose else ("code", _CODE_WORD)
            lead, text = escape_svg(block.lead.strip(" :")), _render_unbroken_words(block.text, words)
            return f'<div class="do"><b>{lead}</b><{tag}>{text}</{tag}></div>'
        case Pairs():
            if block.chips:
                chips = (
                    f'<li class="chip">{escape_svg(name)} <b>{_render_html_text(value)}</b></li>'
                    for name, value in block.rows
                )
                return f'<ul class="chips">{"".join(chips)}</ul>'
            rows = (
                f'<tr><th scope="row">{escape_svg(name)}</th><td>{_render_html_text(value)}</td></tr>'
                for name, value in block.rows
            )
            return f'<div class="scroll"><table class="pairs"><tbody>{"".join(rows)}</tbody></table></div>'
        case Table():
            return _render_html_table(block)
        case Box():
            tone = _CLASSES.get(block.tone, "")
            title, blocks = _render_html_text(block.title), _render_html_blocks(block.blocks)
            return f'<div class="box {tone}"><h3>{title}</h3>{blocks}</div>'
        case Details():
            return (
                f"<details><summary>{escape_svg(block.summary)}</summary>{_render_html_blocks(block.blocks)}</details>"
            )
        case SideBySide():
            return (
                f'<div class="two">{"".join(f"<div>{_render_html_blocks(part)}</div>" for part in block.parts)}</div>'
            )
        case Pictures():
            return f'<div class="pictures">{"".join(map(_render_html_picture, block.pictures))}</div>'
        case Charts():
            return _render_html_charts(block.charts)


def _render_html_blocks(blocks: Sequence[Block]) -> str:
    return "".join(map(_render_html_block, blocks))


def _render_html_table(table: Table) -> str:
    head = ""
    if any(column.title for column in table.columns):
        cells = (
            f'<th scope="col"{_format_alignment_class(column.align)}>{escape_svg(column.title)}</th>'
            for column in table.columns
        )
        head = f"<thead><tr>{''.join(cells)}</tr></thead>"
    body = "".join(map(_render_html_row, [table] * len(table.rows), table.rows))
    return f'<div class="scroll" tabindex="0"><table class="wide">{head}<tbody>{body}</tbody></table></div>'


def _render_html_row(table: Table, row: tuple[Text, ...]) -> str:
    if not row:
        return f'<tr class="line"><td colspan="{len(table.columns)}"></td></tr>'
    first, *others = row
    cells = [f'<th scope="row">{_render_html_text(first)}</th>']
    for column, cell in zip(table.columns[1:], others, strict=True):
        cells.append(f"<td{_format_alignment_class(column.align)}>{_render_html_cell(cell)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _render_html_cell(cell: Text) -> str:
    # A cell that is one good, bad or doubtful word stands out as a label.
    if isinstance(cell, Span) and cell.style in ("good", "warn", "bad"):
        return f'<span class="tag {cell.style}">{escape_svg(cell.text)}</span>'
    return _render_html_text(cell)


def _format_alignment_class(align: str) -> str:
    return ' class="num"' if align == "right" else ""


def _render_html_picture(picture: Picture) -> str:
    source = f"data:image/{picture.format};base64,{base64.b64encode(picture.data).decode()}"
    return (
        f'<figure><figcaption>{escape_svg(picture.caption)}</figcaption><img src="{source}" '
        f'width="{picture.width}" height="{picture.height}" '
        f'alt="{escape_svg(picture.alt or picture.caption)}"></figure>'
    )


def _render_html_charts(charts: Sequence[Chart]) -> str:
    """Return charts in rows of two or three, so that none is alone in a row."""
    small = [chart for chart in charts if not isinstance(chart, Tree)]
    figures = [_render_html_figure(chart, "w6") for chart in charts if isinstance(chart, Tree)]
    # The charts of the last rows, which have two each; all rows before have three.
    in_pairs = {0: 0, 1: 4, 2: 2}[len(small) % 3]
    for n, chart in enumerate(small):
        place = "w3" if n >= len(small) - in_pairs else "w2"
        if len(small) == 1:
            place = "w6" if isinstance(chart, Bars) else "alone"
        figures.append(_render_html_figure(chart, place + (" odd" if n == len(small) - 1 and len(small) % 2 else "")))
    return f'<div class="grid">{"".join(figures)}</div>'


def _render_html_figure(chart: Chart, place: str) -> str:
    found = lay_out_chart(chart)
    unit = f' <span class="unit">{escape_svg(found.unit)}</span>' if found.unit else ""
    legend = "".join(f"<li>{_render_legend_swatch(drawing)}{escape_svg(words)}</li>" for drawing, words in found.legend)
    listed = f'<ul class="legend">{legend}</ul>' if legend else ""
    caption = f"<figcaption>{escape_svg(found.title)}{unit}</figcaption>"
    return f'<figure class="{place}">{caption}{listed}{"".join(map(_render_figure_row, found.rows))}</figure>'


def _render_legend_swatch(drawing: str) -> str:
    return f'<svg width="22" height="11" aria-hidden="true">{drawing}</svg>' if drawing else ""


def _render_figure_row(row: FigureRow) -> str:
    said = f'role="img" aria-label="{escape_svg(row.label)}"' if row.label else 'aria-hidden="true"'
    if row.width:
        return f'<svg class="chart" viewBox="0 0 {row.width} {row.height}" {said}>{row.inside}</svg>'
    name = (
        f'<div class="name"><b>{escape_svg(row.name)}</b><span>{escape_svg(row.words)}</span></div>' if row.name else ""
    )
    return f'<div class="bar">{name}<svg width="100%" height="{row.height}" {said}>{row.inside}</svg></div>'
