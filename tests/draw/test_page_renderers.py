"""One page on the terminal, in HTML, in Markdown and in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from halfstep.draw.html import render_html_document, render_html_fragment
from halfstep.draw.markdown import render_markdown, write_markdown
from halfstep.draw.notebook import PageResult
from halfstep.draw.terminal import render_plain_text
from halfstep.page import (
    Bar,
    BarPiece,
    Bars,
    Box,
    Charts,
    Column,
    Curve,
    Curves,
    Details,
    Heading,
    Instruction,
    Items,
    Page,
    Pairs,
    Paragraph,
    SideBySide,
    Span,
    Table,
    build_charts,
    build_finding_box,
)
from tests.report.looked_at import Page as Parsed

LOSS = Curves("Loss", (Curve("train", [1, 2, 3], [3.0, 2.0, 1.0]),), y_title="loss")
WORK, REST = (Bar(name, words, (BarPiece("work", size),)) for name, words, size in
              (("matrix work", "80%", 0.8), ("other", "20%", 0.2)))  # fmt: skip
SHARES = Bars("Time", (WORK, REST), whole=1.0)
PAGE = Page(
    "a <result>",
    (
        Paragraph((Span("bf16", "good", strong=True), ": 2x as fast")),
        build_finding_box("slow-format", "warning", "fp16 is emulated", "use bf16", "model.py:3"),
        Heading("Figures", "3 seeds"),
        Table(
            (Column("name"), Column("speed", "right"), Column("gradients", "right", terminal="wide"),
             Column("energy", terminal="second"), Column("hardware", terminal="never")),
            (("fp32", "1.0x", "g", "e", "card"), (), ("bf16", Span("2.0x", "good"), "h", "f", "card")),
        ),
        Pairs((("seeds", "1, 2, 3"),)),
        Items(("one", "two")),
        Charts((SHARES,), terminal=True),
        *build_charts(LOSS),
        SideBySide(((Paragraph("left"),), (Details("More about it", (Paragraph("inside"),)),))),
        Instruction("halfstep train a --bf16", gap=True),
    ),
)  # fmt: skip


def test_the_terminal_shows_text_tables_and_bars() -> None:
    narrow = render_plain_text(PAGE).splitlines()
    assert narrow[0] == "bf16: 2x as fast"
    assert [line.rstrip() for line in narrow[1:5]] == [
        "", "warning slow-format  model.py:3", "  fp16 is emulated", "  do: use bf16",
    ]  # fmt: skip
    assert narrow[-1] == "  $ halfstep train a --bf16"
    words = " ".join(" ".join(narrow).split())
    assert "name speed fp32 1.0x bf16 2.0x More name energy fp32 e bf16 f seeds 1, 2, 3 one two" in words
    assert f"matrix work 80% {'#' * 24} other 20% {'#' * 6} left" in words
    assert "gradients" not in words
    assert "gradients" in render_plain_text(PAGE, width=100)


def test_html_escapes_and_has_every_block() -> None:
    found = Parsed(render_html_document([PAGE]))
    assert found.titles[0] == "a <result>"
    for words in ("bf16 : 2x as fast", "do use bf16", "hardware", "inside", "$ halfstep train a --bf16"):
        assert words in found.text, words
    assert [one["aria-label"] for one in found.all("svg") if one.get("class") == "chart"] == ["Loss: train"]
    assert "gradients" in found.text


def test_no_chart_is_alone_in_a_row() -> None:
    for count in range(2, 12):
        page = Parsed(render_html_document([Page("p", (Charts((LOSS,) * count),))]))
        spans = [int(one["class"][1]) for one in page.all("figure")]
        rows = [[spans.pop(0)] for _ in range(1)]
        for span in spans:
            if sum(rows[-1]) + span > 6:
                rows.append([])
            rows[-1].append(span)
        assert all(sum(row) == 6 and len(row) > 1 for row in rows), (count, rows)


def test_markdown_links_its_charts_or_draws_a_line_of_blocks(tmp_path: Path) -> None:
    files = write_markdown(PAGE, tmp_path / "a.md")
    assert [file.name for file in files] == ["a.md", "a.svg", "a-2.svg"]
    text = files[0].read_text()
    assert "![Time](a.svg)" in text
    assert "![Loss](a-2.svg)" in text
    assert "| bf16 | 2.0x | h | f | card |" in text
    assert "`halfstep train a --bf16`" in text
    assert text.startswith(r"## a \<result\>")
    assert "Loss: █▄▁" in render_markdown(PAGE)


@dataclass(frozen=True)
class Result(PageResult):
    speed: float

    def page(self) -> Page:
        return Page("result", (Paragraph(f"{self.speed}x as fast"), Box("a finding", (), "bad")))


def test_a_result_is_html_in_a_notebook_and_text_when_printed() -> None:
    assert str(Result(2.0)) == "2.0x as fast\n\na finding"
    bundle = Result(2.0)._repr_mimebundle_()
    assert bundle["text/plain"] == str(Result(2.0))
    assert bundle["text/html"] == render_html_fragment(Result(2.0).page())
    # Every rule of the style is nested: it reaches nothing of the notebook itself.
    style = re.search(r"<style>(.*?)</style>", bundle["text/html"], re.S)
    assert style is not None
    outside = re.sub(r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}", "", re.sub(r"/\*.*?\*/", "", style[1]))
    selectors = {line.strip() for line in outside.splitlines() if line.strip()}
    assert "@media (prefers-color-scheme: dark)" in selectors
    assert all(
        line.endswith((".halfstep", ".halfstep)")) for line in selectors - {"@media (prefers-color-scheme: dark)"}
    ), selectors


def test_a_page_needs_no_optional_package() -> None:
    code = (
        "import sys\n"
        "for name in ('numpy', 'rich', 'jinja2', 'PIL', 'torch'): sys.modules[name] = None\n"
        "import halfstep.page, halfstep.draw.html, halfstep.draw.markdown, halfstep.draw.curves\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_narrow_terminal_cuts_names_and_leaves_out_columns_in_their_order() -> None:
    columns = (
        Column("name", wrap="cut", widest=20),
        Column("state", wrap="never"),
        Column("first", "right", "never", left_out=1),
        Column("second", "right", "never", left_out=2),
    )
    page = Page("runs", (Table(columns, (("x" * 50, "finished", "1,234,567", "7,654,321"),)),))
    assert "x" * 19 + "…  finished  1,234,567  7,654,321" in render_plain_text(page, 80)
    head, row, said = render_plain_text(page, 40).splitlines()
    assert "finished  7,654,321" in row
    assert "1,234,567" not in row
    assert max(map(len, (head, row))) <= 40
    assert said == "no room for first in this terminal: --json has all"
