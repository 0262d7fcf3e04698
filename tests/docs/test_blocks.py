"""Every command and every block of code in README and docs runs, or says why it does not.

What a page may say about a block, in a comment on the line before it:

    <!-- run: full -->          takes over 20 seconds: run with --full
    <!-- run: with WORDS -->    run with these words added to each command, so that it ends sooner
    <!-- run: ends with 79 -->  run, and ends with this exit code
    <!-- run: gpu -->           needs a GPU: not run here
    <!-- run: no: REASON -->    hours, a network, a placeholder
    <!-- output -->             what the block before it prints; numbers may differ
    <!-- output: REASON -->     what something else printed; shown, not compared
    <!-- file: NAME -->         a file that later blocks use; so is Python that begins with `# name.py`

and `<!-- setup`, Python, `-->` or `<!-- setup: commands`, commands, `-->` for what a reader has already: run like a
block, and not shown.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, pages
from tests.docs.running import Page


def _with_full_blocks() -> list[str]:
    return [page for page in pages() if any(block.when == "full" for block in blocks(page))]


def _run(page: str, folder: Path, full: bool, text: str | None = None) -> None:
    running = Page(folder, full)
    try:
        for block in blocks(page, text):
            running.run(block)
    finally:
        running.close()
    print(*(f"{page}:{line}: {taken:.1f} s" for line, taken in running.seconds.items() if taken > 1), sep="\n")


def test_every_block_is_run_or_says_why_not() -> None:
    every = [block for page in pages() for block in blocks(page)]
    assert len(every) >= 80
    unknown = [f"{block.page}:{block.line}" for block in every if block.kind == "unknown"]
    unsaid = [f"{block.page}:{block.line}" for block in every if block.kind == "not run" and len(block.reason) < 5]
    assert (unknown, unsaid) == ([], [])


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page)])
@pytest.mark.wording
def test_the_blocks_of(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(page, tmp_path, full=False)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", _with_full_blocks())
def test_also_the_long_blocks_of(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(page, tmp_path, full=True)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert 1 == 2\n```",
        "```python\nprint(1 + 1)  # 3\n```",
        "```python\nx = 1\n```\n\n```python\nprint(x, y)\n```",
        "```\nhalfstep train no_such_recipe\n```",
        "```bash\nhalfstep recipes --no-such-option\n```",
        "```\nhalfstep recipes; halfstep no_such_command\n```",
        "```bash\nhalfstep recipes\n```\n\n<!-- output -->\n```\na line that nothing prints\n```",
        "```\npip install halfstep[nothing]\n```",
        "```json\n{1: 2}\n```",
        "<!-- setup\nraise SystemExit(3)\n-->",
    ],
)
def test_a_wrong_block_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, ValueError)):
        _run("docs/wrong.md", tmp_path, full=False, text=text)


def test_what_cannot_be_told_is_unknown() -> None:
    text = "```\nls -l\n```\n\n```text\nwords\n```\n\n<!-- run: no -->\n```\nhalfstep train unet\n```"
    first, second, third = blocks("docs/wrong.md", text)
    assert (first.kind, second.kind, third.kind, third.reason) == ("unknown", "unknown", "not run", "")
