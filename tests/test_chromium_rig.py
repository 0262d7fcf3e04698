"""The rig that opens pages in Chromium sees what a hostile page does; a blind one would call every page harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chromium import DESK, PHONE, Chromium

HOSTILE = {
    "a script": ("<script>alert('x')</script>", "dialogs"),
    "a script that only computes": ("<script>window.x = 1</script>", "scripts"),
    "a handler": ("<img src='data:,' onerror='alert(1)'>", "dialogs"),
    "a handler of a drawing": ("<svg onload='console.log(7)'></svg>", "console"),
    "an address": ("<a href=\"javascript:alert('x')\">look</a>", "dialogs"),
    "a picture elsewhere": ("<img src='http://example.invalid/a.png'>", "requests"),
    "a picture beside it": ("<img src='beside.png'>", "requests"),
    "a style elsewhere": ("<style>@import url('https://example.invalid/a.css');</style>", "requests"),
    "a handler on a mouse": ("<p onmouseover='alert(2)'>x</p>", "dialogs"),
}
HARMLESS = "<!doctype html><meta name=viewport content='width=device-width'><style>body{margin:0}</style>"


def seen(browser: Chromium, folder: Path, html: str) -> dict[str, list[str]]:
    (folder / "page.html").write_text(HARMLESS + html)
    with browser.open(folder / "page.html") as page:
        page.use()
        return {name: found for name, found in vars(page.seen).items() if found}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_page_does_is_seen(browser: Chromium, tmp_path: Path, case: str) -> None:
    html, where = HOSTILE[case]
    assert where in seen(browser, tmp_path, html)


def test_a_page_that_does_nothing_is_seen_to_do_nothing(browser: Chromium, tmp_path: Path) -> None:
    assert seen(browser, tmp_path, "<p>&lt;script&gt;</p><svg><text>x</text></svg><img src='data:,'>") == {}


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_width_of_a_page(browser: Chromium, tmp_path: Path, width: int) -> None:
    wide = "<div style='overflow:auto'><p style='width:3000px'>in</p></div><p id=out style='width:700px'>x</p>"
    (tmp_path / "page.html").write_text(HARMLESS + wide)
    with browser.open(tmp_path / "page.html", width=width) as page:
        assert page.scroll_width == max(width, 700)
        assert [one[:8] for one in page.wider_than_window()] == ['<p id="o'] * (width < 700)
        assert '<p id="out"' in page.dom
        assert page.screenshot(tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("dark", [False, True])
def test_the_colours_that_a_reader_prefers(browser: Chromium, tmp_path: Path, dark: bool) -> None:
    (tmp_path / "page.html").write_text(HARMLESS)
    with browser.open(tmp_path / "page.html", dark=dark) as page:
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is dark
