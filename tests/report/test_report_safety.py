"""Names and values from others are shown as they are, and do nothing; the page loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from halfstep.draw.markdown import escape_markdown
from halfstep.report.html import render_html_report
from halfstep.report.markdown import render_markdown_report
from halfstep.report.run_facts import read_run_facts
from tests.report.looked_at import Page
from tests.report.written import end, speed, start, step, write_run

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title><svg onload=alert(1)>",
    "</style><style>*{display:none}</style>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "' onmouseover='alert(1)",
    "\x1b[2J\x07\x00bell",
    "\u202egnp.exe",
    "]]><!--",
    "&lt;script&gt;",
    "a\r\nb\tc",
]


def hostile_run(folder: Path, text: str) -> Path:
    """A run in which every text is this one."""
    recipe = {"task": text, text: {text: text}, "train": {"seed": 1}}
    precision = {"asked": text, "took": text, "chosen": text, "summary": text, "reasons": [text]}
    culprit = {"operation": text, "module": text, "line": text, "format": text, "largest_input": 1, "limit": 2}
    facts = {"attempt": 1, "cause": text, "culprit": culprit, "evidence": [text]}
    facts["remedies"] = [{"kind": text, "target": text, "works": True}]
    return write_run(
        folder,
        [
            start(
                label=text, command=text, recipe=recipe, precision=precision, notes=[text], host=text, job=text,
                device={"name": text}, versions={text: text}, flags={text: text}, git={"commit": text, "branch": text},
                metric={"name": text, "higher_is_better": True}, findings=[{"id": text, "evidence": text, "fix": text}],
            ),
            {"event": "precision_check", "text": text, "share": 0.5},
            step(1, reason=text, loss="NaN"),
            step(2),
            {"event": "guard", "kind": "verdict", "text": text, "facts": facts},
            {"event": "guard", "kind": "remedy", "text": text, "facts": {}},
            speed(meters={"headroom_bits": 2.0, "headroom_module": text}),
            {"event": "epoch", "epoch": 1, "train": {text: 0.5}, "val": {text: 0.5}, "seconds": 1.0},
            end("gave_up", error=text, do=text, metrics={text: 0.5}),
        ],
    )  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, text: str) -> None:
    runs = [read_run_facts(hostile_run(tmp_path / name, text)) for name in ("one", "two")]
    plain = Page(
        render_html_report([read_run_facts(write_run(tmp_path / "plain", [start(), step(1), step(2), speed(), end()]))])
    )
    for page in (render_html_report(runs[:1]), render_html_report(runs)):
        found = Page(page)
        assert {tag for tag, _ in found.elements} <= {tag for tag, _ in plain.elements} | {"polyline", "path", "circle"}
        names = {name for _, attributes in found.elements for name in attributes}
        assert not [name for name in names if name.startswith("on") or name in ("href", "style", "srcdoc")]
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page.replace("\r\n", "\n"))
    visible = "".join(c if c.isprintable() else " " for c in text.split("\x1b")[0].split("\u202e")[0].split("\r")[0])
    assert visible in Page(render_html_report(runs[:1])).text


def test_control_characters_are_made_visible(tmp_path: Path) -> None:
    page = render_html_report([read_run_facts(hostile_run(tmp_path / "run", "\x1b[2J\u202egnp.exe"))])
    assert r"\x1b[2J\u202egnp.exe" in page


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page = render_html_report([read_run_facts(hostile_run(tmp_path / "run", "plain"))])
    assert not re.search(r"(?i)<(script|link|iframe|object|embed|base|form)\b|https?://|@import|url\(", page)
    policy = next(
        one["content"] for one in Page(page).all("meta") if one.get("http-equiv") == "Content-Security-Policy"
    )
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_no_markup_in_markdown(tmp_path: Path, text: str) -> None:
    found = render_markdown_report([read_run_facts(hostile_run(tmp_path / "run", text))])
    bare = re.sub(r"\\[\\`*_{}\[\]<>#|!~&$@]", "", found)
    assert {tag for tag in re.findall(r"<[^>]*>", bare)} == {"<details>", "<summary>", "</summary>", "</details>"}
    # Every row of a table has as many cells as its head.
    for block in re.findall(r"(?:^\|.*\n)+", bare, re.M):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_markdown_is_escaped_on_one_line() -> None:
    assert escape_markdown("a|b\n# @you `x` <b>") == r"a\|b \# \@you \`x\` \<b\>"
    assert escape_markdown("http://host") == "http:\u200b//host"
