"""The site fetches nothing from a network, wherever it stands, and is served on this machine."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs", reason="the site is built with the extra docs")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "fetches"),
    [
        ('<link rel="canonical" href="http://127.0.0.1:8000/replay.html">', False),
        ('<link href="https://pages.example/start.html" rel="next">', False),
        ('<link rel="stylesheet" href="assets/main.css">', False),
        ('<a href="https://pytorch.org">', False),
        ('<link rel="stylesheet" href="https://fonts.example/roboto.css">', True),
        ('<link href="https://fonts.example" rel="preconnect" crossorigin>', True),
        ('<script async src="https://cdn.example/mermaid.js"></script>', True),
        ('<img alt="badge" src="http://badges.example/ci.svg">', True),
    ],
)
def test_a_page_that_would_fetch_something_ends_the_build(
    hook: ModuleType, tmp_path: Path, line: str, fetches: bool
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "page.html").write_text(f"<html><head>\n{line}\n</head></html>")
    config = SimpleNamespace(site_dir=str(tmp_path))
    if fetches:
        with pytest.raises(hook.PluginError, match=r"page\.html would fetch"):
            hook.on_post_build(config)
    else:
        hook.on_post_build(config)


def test_the_front_page_starts_with_the_first_screen_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.split(r"^## A (?:whole|complete training) run$", text, flags=re.MULTILINE)[0]
    assert readme != text
    front = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    repository = re.search(r"^\[Repository\]\(\.\./README\.md\).*\n", front, flags=re.MULTILINE)
    assert repository is not None
    assert front.replace(repository[0], "").startswith(readme.replace("](docs/", "]("))
    for needed in ("pip install halfstep", "![", "{'loss_not_finite': 1}", "Tested on Linux"):
        assert needed in readme


def test_words_of_code_stay_on_one_line(hook: ModuleType) -> None:
    long = "x" * 40
    page = hook.on_page_content(f"<p><code>halfstep train --guard {long}</code></p>", None, None, None)
    assert '<span class="word">--guard</span>' in page
    assert f">{long}<" not in page


def test_a_table_with_sentences_names_the_column_of_each_cell(hook: ModuleType) -> None:
    rows = "<tr><th>see</th><th>type</th></tr>", "<tr><td>{}</td><td>doctor</td></tr>"
    table = f"<table>{''.join(rows)}</table>"
    sentences, figures = (hook.on_page_content(table.format(cell), None, None, None) for cell in ("long " * 20, "1.0"))
    assert '<td data-column="type">doctor</td>' in sentences
    assert figures == table.format("1.0")


@pytest.mark.full
def test_it_is_served_until_ctrl_c(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        served = subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "docs", "--serve"], stdout=log, stderr=log, start_new_session=True
        )
        try:
            page = _first_page(served, tmp_path / "log")
        finally:
            served.send_signal(signal.SIGINT)
            code = served.wait(60)
    said = (tmp_path / "log").read_text()
    assert re.search("<title>halfstep", page)
    assert code == 0, said
    assert "Traceback" not in said


def _first_page(served: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(240):
        time.sleep(0.5)
        assert served.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen("http://127.0.0.1:8000/") as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            continue
    raise AssertionError(log.read_text())
