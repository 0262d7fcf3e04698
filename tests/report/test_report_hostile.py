"""Twelve hostile texts in every place that a text can come from: a browser shows them, and does nothing for them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from halfstep.cli.main import build
from halfstep.printable import escape_to_one_line
from tests.report.test_report_compared import plan
from tests.report.written import end, epoch, speed, start, step
from tests.support.chromium import DESK, PHONE, Chromium, Page

ROOT = Path(__file__).parents[2]
RUNS = "globalThis.PWNED=1;alert(1)"
TEXTS = {
    "script": f"<script>{RUNS}</script>",
    "attribute": f'"><img src=x onerror="{RUNS}">',
    "single quotes": f"' autofocus onfocus='{RUNS}' x='",
    "drawing": f"</svg></title></text><svg onload='{RUNS}'><animate onbegin='{RUNS}' attributeName=x dur=1s>",
    "cdata": f"]]><!--><script>{RUNS}</script>--><![CDATA[",
    "template": "{{ 7 * 7 }}{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}${7*7}#{7*7}",
    "address": "javascript:alert(1)//https://example.invalid/%0aalert(1)",
    "entities": "&lt;script&gt;alert(1)&lt;/script&gt;&#60;img src=x onerror=alert(1)&#62;&amp;quot;&NotAnEntity;",
    "style": "</style><style>@import 'https://example.invalid/x.css';*{background:url(//example.invalid/y)}</style>",
    "control": "\x1b]0;PWNED\x07\x1b[31m\x08\x00\x7f\x9bRED\r\nFAKE LINE\u2028\u2029\ufeff",
    "direction": "\u202egnp.exe\u2066\u200f\u202d<u>bold\u2069</u>",
    "long": "W" * 3000 + "<iframe src=//example.invalid>" + "\u0301" * 200,
}
TAGS = ("script", "iframe", "object", "embed", "form", "base", "link", "animate", "u", "foreignObject")
KEPT = {"event", "format", "utc"}
"""Fields without which a line is none, or of another form."""
WORDS = {"kind", "reason", "chosen", "state", "level", "cause", "works", "verdict", "task", "precision"}
"""Fields whose words decide what is shown: once as they are, and once hostile too."""
FREE = {"recipe", "versions", "flags", "train", "val", "metrics", "skipped", "git", "reasons", "conditions", "changes"}
"""Fields whose inner names come from others as well."""


def hostile(value: Any, texts: Iterator[str], words: bool, free: bool = False) -> Any:
    """The same data with the next hostile text in place of every text, and of every name that is not ours."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, list):
        return [hostile(one, texts, words, free) for one in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, inner in value.items():
        is_kept = not free and (key in KEPT or (key in WORDS and not words and isinstance(inner, str)))
        name = next(texts) if free else key
        found[name] = inner if is_kept else hostile(inner, texts, words, free or key in FREE)
    return found


def events() -> list[dict[str, Any]]:
    """A run with an event of every kind that the journal has."""
    culprit = {"operation": "o", "module": "m", "line": "l", "format": "fp16", "largest_input": 9e4, "limit": 65504.0}
    remedies = [{"kind": "island", "target": "up.0", "works": True}]
    facts = {"attempt": 3, "cause": "precision", "culprit": culprit, "evidence": ["e"], "remedies": remedies}
    found = [start(findings=[{"id": "i", "evidence": "e", "fix": "f", "severity": "warning"}], resumed=None)]
    found += [{"event": "stage", "text": "t"}, {"event": "precision_check", "expected": "x", "share": 0.5, "text": "t"}]
    found += [step(n) for n in range(1, 30)]
    found += [step(n, reason=f"reason {n}", loss="NaN", applied=False) for n in range(30, 42)]
    found += [{"event": "bad_sample", "rank": 0, "name": "n.png", "reason": "r", "index": 1, "replacement": 2}]
    found += [{"event": "guard", "kind": k, "level": "warning", "text": "t", "facts": facts} for k in GUARD]
    found += [{"event": "note", "text": "t", "level": "warning"}, speed(), speed(), epoch(1, 0.5), epoch(2, 0.6)]
    found += [{"event": "saved", "file": "pictures/a.png", "kind": "picture"}]
    return [*found, end("gave_up", error="e", do="d", cause="c", checkpoint="k", checkpoint_note="n", remedies=["r"])]


GUARD = ("verdict", "remedy", "alarm", "probation", "verdict")


def write_hostile(folder: Path, first: int, words: bool) -> Path:
    """A run in which every text is hostile, the one of this number first; also the name of its folder."""
    order = list(TEXTS.values())
    texts = cycle(order[first:] + order[:first])
    run = folder / f"run {next(texts)[:120]}".replace("\0", "") / "last"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(hostile({"recipe": {"a": {"b": "c"}}}, texts, words)))
    lines = [{"time": float(n), "utc": "2026-01-01T00:00:00", **one} for n, one in enumerate(events())]
    (run / "journal.jsonl").write_text("".join(json.dumps(hostile(one, texts, words)) + "\n" for one in lines))
    status = {"state": "ended", "code": 80, "reason": "r", "host": "h", "pid": 1, "job": "j", "phase": "p"}
    (run / "status.rank-00000.json").write_text(json.dumps(hostile(status, texts, words)))
    result = {"weights": "w", "precision": "fp16", "best": {"metric": "iou", "value": 0.5, "epoch": 1}, "metrics": {}}
    (run / "result.json").write_text(json.dumps(hostile(result, texts, words)))
    (run / "task.json").write_text(json.dumps({"classes": order}))
    pictures = run / "pictures"
    pictures.mkdir()
    for text in order:
        (pictures / re.sub(r"[/\0]", "_", text)[:60]).with_suffix(".png").write_bytes(b"no picture")
    (pictures / "epoch-0001.png").write_bytes(b"\x89PNG\r\n\x1a\n" + RUNS.encode())
    return run


def written(folder: Path, *paths: Path) -> Path:
    """The page that the command writes about these."""
    file = folder / "page.html"
    done = CliRunner().invoke(build(["report"]), ["report", *map(str, paths), "--output", str(file)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert all(c == "\n" or c.isprintable() for c in done.output), repr(done.output)
    assert file.stat().st_size < 1_000_000
    return file


def look(browser: Chromium, file: Path, width: int = PHONE, dark: bool = False) -> None:
    """Open a page, use all of it, and see that nothing ran, nothing was asked for, and nothing sticks out."""
    with browser.open(file, width=width, dark=dark) as page:
        _nothing_ran(page)
        assert page.window_width == width
        assert page.scroll_width <= width, page.wider_than_window()
        page.use()
        _nothing_ran(page)


def _nothing_ran(page: Page) -> None:
    assert vars(page.seen) == {name: [] for name in vars(page.seen)}
    assert page.evaluate("typeof globalThis.PWNED") == "undefined"
    assert page.evaluate(f"document.querySelectorAll({json.dumps(', '.join(TAGS))}).length") == 0
    assert page.evaluate(_HANDLERS) == []
    assert not [href for href in page.evaluate(_ADDRESSES) if not str(href).startswith(("#", "data:image/"))]
    assert "\u202e" not in page.dom
    assert "\x1b" not in page.dom


_HANDLERS = """[...document.querySelectorAll("*")].flatMap(
  e => e.getAttributeNames()).filter(n => /^on|^srcdoc$/.test(n))"""
_ADDRESSES = """[...document.querySelectorAll("[href], [src], [action], [formaction]")].flatMap(
  e => ["href", "src", "action", "formaction"].map(n => e.getAttribute(n)).filter(v => v !== null))"""


@pytest.mark.parametrize("first", range(0, len(TEXTS), 2), ids=lambda n: list(TEXTS)[n])
def test_a_run_of_hostile_texts_does_nothing_in_a_browser(browser: Chromium, tmp_path: Path, first: int) -> None:
    run = write_hostile(tmp_path, first, words=first % 4 == 0)
    look(browser, written(tmp_path, run), dark=first % 4 == 0)


def test_hostile_runs_side_by_side(browser: Chromium, tmp_path: Path) -> None:
    runs = [write_hostile(tmp_path / str(n), n, words=False) for n in (0, 3, 9)]
    look(browser, written(tmp_path, *runs))


def test_a_hostile_bench_and_a_hostile_plan(browser: Chromium, tmp_path: Path) -> None:
    bench = json.loads((ROOT / "benchmarks" / "parity_cifar.json").read_text())
    texts = cycle(f"{n} {text}" for n, text in enumerate(TEXTS.values()))
    # A plan whose conditions have other names is refused.
    ours = {key: hostile(value, texts, words=False, free=True) for key, value in plan()["conditions"].items()}
    planned = {**hostile(plan(), texts, words=False), "conditions": ours}
    for name, found in (("bench.json", hostile(bench, texts, words=False)), ("plan.json", planned)):
        (tmp_path / name).write_text(json.dumps(found))
    look(browser, written(tmp_path, tmp_path / "bench.json", tmp_path / "plan.json"))


def test_texts_are_shown_as_they_are(browser: Chromium, tmp_path: Path) -> None:
    """Harmless, and still what was written: a reader sees the class that is called so."""
    shown = {name: text for name, text in TEXTS.items() if name not in ("control", "direction", "long")}
    settings = {f"setting_{n}": text for n, text in enumerate(shown.values())}
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("task: x\n")
    told = [start(recipe={"data": settings}, command=" ".join(shown.values())), step(1), step(2), end()]
    (run / "journal.jsonl").write_text("".join(json.dumps({"time": 1.0, "utc": "x", **one}) + "\n" for one in told))
    with browser.open(written(tmp_path, run), width=DESK) as page:
        text = " ".join(str(page.evaluate("document.documentElement.textContent")).split())
    for name, one in shown.items():
        assert " ".join(escape_to_one_line(one).split()) in text, name


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_of_a_million_lines_takes_20_seconds_and_a_megabyte(tmp_path: Path) -> None:
    from benchmarks.journal_million import write_journal

    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("task: classification\n")
    write_journal(run, 1_000_000)
    code = (
        "import sys, time; from halfstep.cli.main import main; sys.argv = ['halfstep', 'report', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit as ended: assert not ended.code\n"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 20.0
    assert (run / "report.html").stat().st_size < 1_000_000
    assert "911" in (run / "report.html").read_text(), "every skip is counted"
