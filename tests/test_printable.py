"""Words of others on a terminal: whatever they hold, they are only read. And no page goes round the one way there."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import halfstep
from halfstep.printable import escape_to_one_line, escape_unprintable
from halfstep.terminal import create_console, print_plain_text

HOSTILE = [
    "a\x1b]0;PWNED\x07\x1b[31mRED\x1b[2J",
    "x[/b].png",
    "[bold]y[/]",
    "[link=https://example.com]z[/link].png",
    "c\u202egnp.exe",
    "\u2066d\u2069\u200b",
    "e\x9b31m\x85",
    "f\rover\x08written",
    "g\udcff.png",
    ":smile:.png",
    "b\x00\x7f",
]
"""Names that a file, a class or a setting can have."""
SOURCE = Path(halfstep.__path__[0])
WAYS = {"print", "Console"}
WORDS = ("print(", "Console(", "echo(", "markup", "emoji=")
ALLOWED = {
    "terminal.py",  # the way itself
    "journal/jsonl.py",  # where the journal cannot be written
    "measure/worker.py",  # answers to the process that asked
    "measure/memory/way_out.py",
    "train/signals.py",  # fixed words, from a thread, while a kernel runs
    "measure/worker_process.py",
    "measure/profile/reading.py",  # a script of its own
}


def harmless(text: str) -> bool:
    return all(character == "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_only_read(name: str) -> None:
    assert harmless(escape_unprintable(name))
    assert escape_to_one_line(name + "\nFinished").isprintable()
    assert escape_unprintable("a\nb") == "a\nb"
    assert escape_to_one_line("a\nb") == "a b"
    for text in ("ordinary.png", "größe 1 × 2", "日本語.png", "[a]"):
        assert escape_unprintable(text) == escape_to_one_line(text) == text


def drawn(content: object, width: int = 80) -> str:
    console = create_console(file=io.StringIO(), width=width)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_no_renderable_lets_it_through(name: str) -> None:
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    for content in (name, Text(name), Text.assemble((name, "bold"), name), table):
        assert harmless(drawn(content))
    assert "[bold]y[/]" in drawn("[bold]y[/]")
    assert ":smile:" in drawn(":smile:")


def test_colours_and_bars_of_our_own_go_through() -> None:
    console = create_console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=60, legacy_windows=False
    )
    with Progress(console=console) as bar:
        bar.add_task("working\x1b[2J", total=2)
        console.print(Text("good", style="green"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[32mgood" in text
    assert "\x1b[?25l" in text
    assert "working\\x1" in text


def test_lines_to_copy_are_said_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_plain_text("a" * 200 + "\n" + HOSTILE[0])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a" * 200
    assert lines[1].isprintable()


def goes_round(path: Path) -> list[str]:
    """Where a file writes to a terminal by itself: `print`, a Console of rich's own, markup, or typer's echo."""
    found, text = [], path.read_text(encoding="utf-8")
    if not any(word in text for word in WORDS):
        return []  # reading it closely takes a while, and there are hundreds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            markup = any(keyword.arg in ("markup", "emoji") for keyword in node.keywords)
            if name in WAYS or attribute in ("echo", "secho", "from_markup") or markup:
                found.append(f"{path}:{node.lineno}")
    return found


def test_there_is_one_way_to_the_terminal() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    assert len(files) > 300
    assert [one for name, path in files.items() if name not in ALLOWED for one in goes_round(path)] == []
    assert goes_round(files["terminal.py"]), "the rule sees what it forbids"
