"""Check what a page cites: files, tests, headings, modules and names that exist, commands with known options."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shlex
from pathlib import Path
from typing import Any

import typer

import halfstep
from halfstep.cli._commands import list_command_names
from halfstep.cli.main import build
from halfstep.cli.recipes import ACTIONS
from halfstep.recipe.names import parse_typed_settings
from halfstep.recipe.scripts import read_script
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import find_task_schema
from tests.guides.items import ROOT

TAKE_A_RECIPE = ("train", "bench", "plan", "estimate", "profile", "audit", "doctor")


def kind(shown: str) -> str:
    """Return `command`, `module`, `name` or `file`, or nothing for a word that is only quoted."""
    if shown.startswith("halfstep "):
        return "command"
    if shown.startswith("python -m "):
        return "module"
    if shown.startswith("halfstep."):
        return "name"
    return "file" if "/" in shown.partition("#")[0] or shown in ("README.md", "pyproject.toml") else ""


def check(shown: str) -> None:
    """Raise unless what is cited exists."""
    match kind(shown):
        case "file":
            check_file(shown)
        case "command":
            check_command(shlex.split(shown)[1:])
        case "module":
            module = shown.split()[2]
            spec = importlib.util.find_spec(module)
            assert spec, f"there is no module {module}"
            package = spec.submodule_search_locations is not None
            assert not package or importlib.util.find_spec(f"{module}.__main__"), f"{module} cannot be run"
        case "name":
            assert hasattr(halfstep, shown.partition(".")[2]), f"there is no {shown}"


def check_file(shown: str) -> None:
    """Raise AssertionError unless the file is there, with the test or the heading that is named."""
    path, _, test = shown.partition("::")
    path, _, heading = path.partition("#")
    assert (ROOT / path).exists(), f"{path} is not there"
    if test or Path(path).name.startswith("test_"):
        tests = {name for name in _functions(ROOT / path) if name.startswith("test_")}
        assert tests, f"{path} has no tests"
        assert not test or test in tests, f"{path} has no {test}"
    if heading:
        titles = [_slug(line) for line in (ROOT / path).read_text().splitlines() if line.startswith("#")]
        assert heading in titles, f"{path} has no heading {heading}"


def check_command(words: list[str]) -> None:
    """Raise unless there is this command with these options, and the rest are settings of its recipe."""
    name, *rest = words
    own = known_options(name, rest)
    if name in TAKE_A_RECIPE and own:
        found = read_recipe(own[0])
        parse_typed_settings(own[1:], find_task_schema(str(found.raw["task"])))
    elif name == "recipes" and own:
        assert own[0] in ACTIONS, f"halfstep recipes does not know {own[0]}"
        for one in own[1:]:
            read_script(one) if "--script" in rest else read_recipe(one)
    else:
        assert not own, f"halfstep {name} does not know {own}"


def known_options(name: str, rest: list[str]) -> list[str]:
    """Return the words that are neither options of the command nor their values; it must be one that there is."""
    assert name in list_command_names(), f"there is no command {name}"
    switches = {text: one.is_flag for one in _commands()[name].params for text in one.opts if text.startswith("--")}
    own, waiting = [], list(rest)
    while waiting:
        word = waiting.pop(0)
        if word not in switches:
            own.append(word)
        elif not switches[word]:
            del waiting[:1]
    return own


def _slug(line: str) -> str:
    letters = line.lstrip("# ").lower().replace(" ", "-")
    return "".join(letter for letter in letters if letter.isalnum() or letter in "-_")


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _commands() -> Any:
    return typer.main.get_command(build()).commands  # type: ignore[attr-defined]
