"""docs/guides.md: all items of the guides, with evidence that exists and counts that agree."""

from __future__ import annotations

import ast
import functools
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from halfstep.cli._commands import command_names
from halfstep.cli.main import build
from halfstep.recipe.names import read_flags
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import task_schema
from tests.guides.items import PAGE, ROOT, STATES, Item, counts, items, with_counts

ITEMS = {
    "U-Net": 69,
    "ResNet-50 on ImageNet-100": 75,
    "Concepts, with a diffusion model": 44,
    "Slots in video": 31,
    "Radio maps: a report": 30,
}
LEAST_DONE = 195
TEXT = PAGE.read_text(encoding="utf-8")
FOUND = items(TEXT)
SHOWN = sorted({(shown, item.awaits_a_merge) for item in FOUND for shown in item.shown})
TAKE_A_RECIPE = ("train", "bench", "plan", "estimate", "profile", "audit", "doctor")


def test_every_item_of_every_guide_is_there_once() -> None:
    assert {guide: [item.number for item in FOUND if item.guide == guide] for guide in ITEMS} == {
        guide: list(range(1, number + 1)) for guide, number in ITEMS.items()
    }
    assert len(FOUND) == sum(ITEMS.values()) == 249
    assert {item.state for item in FOUND} == set(STATES)


def test_the_counts_at_the_top_are_those_of_the_tables() -> None:
    assert with_counts(TEXT) == TEXT, "run python -m tests.guides.items"
    assert counts(FOUND).splitlines()[-1].startswith("| all | 249 | ")
    assert sum(item.state == "done" for item in FOUND) >= LEAST_DONE


@pytest.mark.parametrize(
    "item", [item for item in FOUND if item.state == "done"], ids=lambda item: f"{item[0]} {item[1]}"
)
def test_what_is_done_has_something_to_show(item: Item) -> None:
    assert any(_kind(shown) for shown in item.shown), item


@pytest.mark.parametrize(("shown", "awaited"), SHOWN)
def test_what_is_shown_exists(shown: str, awaited: bool) -> None:
    kind = _kind(shown)
    if kind == "file" and not awaited:
        _check_file(shown)
    elif kind == "command":
        _check_command(shlex.split(shown)[1:])


def test_the_exercise_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = TEXT.partition("   ```python\n")[2].partition("   ```")[0]
    exec("\n".join(line.removeprefix("   ") for line in block.splitlines()), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "(False, {'gradient_overflow': 24})"
    assert second.startswith("(True, ")


def test_a_wrong_citation_is_seen() -> None:
    for wrong in ("tests/guides/no_such.py", "tests/guides/items.py::test_none", "docs/guides.md#nothing"):
        with pytest.raises(AssertionError):
            _check_file(wrong)
    for words in ("fly", "doctor --fly", "train unet no_such=3", "bench no_such_recipe"):
        with pytest.raises(Exception, match=r".+"):
            _check_command(words.split())


def _kind(shown: str) -> str:
    """`command`, `file`, or nothing for a word that is only quoted."""
    if shown.startswith("halfstep "):
        return "command"
    return "file" if "/" in shown.partition("#")[0] or shown in ("README.md", "pyproject.toml") else ""


def _check_file(shown: str) -> None:
    path, _, test = shown.partition("::")
    path, _, heading = path.partition("#")
    assert (ROOT / path).exists(), f"{path} is not there"
    if test:
        assert test in _functions(ROOT / path), f"{path} has no {test}"
    if heading:
        titles = [line.lstrip("# ").lower().replace(" ", "-") for line in (ROOT / path).read_text().splitlines()]
        assert heading in titles, f"{path} has no heading {heading}"


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _commands() -> Any:
    return typer.main.get_command(build()).commands  # type: ignore[attr-defined]


def _check_command(words: list[str]) -> None:
    """A command that is there, options that it has, and for the rest settings of its recipe."""
    name, *rest = words
    assert name in command_names(), f"there is no command {name}"
    switches = {text: one.is_flag for one in _commands()[name].params for text in one.opts if text.startswith("--")}
    own: list[str] = []
    while rest:
        word = rest.pop(0)
        if word not in switches:
            own.append(word)
        elif not switches[word]:
            rest.pop(0)
    if name in TAKE_A_RECIPE and own:
        found = read_recipe(own[0])
        read_flags(own[1:], task_schema(str(found.raw["task"])))
    else:
        assert not own, f"halfstep {name} does not know {own}"
