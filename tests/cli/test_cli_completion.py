"""What a shell offers after Tab: commands, recipes, folders of runs; without torch, and in a moment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.cli import _completion
from halfstep.recipe.sources import list_recipe_names

EACH = """
import io, json, os, sys, time
from contextlib import redirect_stdout
from halfstep.cli.main import main
said = {}
for name, words in json.loads(sys.argv[1]).items():
    os.environ.update(words)
    sys.argv = ["halfstep"]
    with redirect_stdout(io.StringIO()) as out:
        try: main()
        except SystemExit as ended: assert not ended.code, name
    said[name] = out.getvalue()
print(json.dumps({"said": said, "torch": "torch" in sys.modules, "cpu": time.process_time()}))
"""
"""Several key presses in one process, which would still have torch if one had loaded it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").write_text("")
    (tmp_path / "runs" / "no_run").mkdir()
    (tmp_path / "runs" / "esc\x1b[2J").mkdir()
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bash(words: str) -> dict[str, str]:
    return {"_HALFSTEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}


def test_three_shells_are_answered_without_torch(folder: Path) -> None:
    zsh = {"_HALFSTEP_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "halfstep train seg"}
    fish = {**zsh, "_HALFSTEP_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    asked = {
        "command": bash("halfstep pro"),
        "recipe": bash("halfstep train segmen"),
        "path": bash("halfstep train mi"),
        "run": bash("halfstep evaluate "),
        "one run": bash("halfstep verify runs/f"),
        "zsh": zsh,
        "fish": fish,
        **{f"source {shell}": {"_HALFSTEP_COMPLETE": f"source_{shell}"} for shell in ("bash", "zsh", "fish")},
    }
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(asked)], capture_output=True, text=True, check=True, cwd=folder
    )
    told = json.loads(done.stdout)
    said = told["said"]
    assert said["command"].split() == ["profile"]
    assert said["recipe"].split() == ["segment", "segmentation_tiny"]
    assert said["path"].split() == ["mine.yaml"]
    assert said["run"].split() == ["runs/first", "runs/second"]
    assert said["one run"].split() == ["runs/first"]
    assert '"segment"' in said["zsh"]
    assert said["fish"].split() == ["segment", "segmentation_tiny"]
    assert all("halfstep" in said[f"source {shell}"] for shell in ("bash", "zsh", "fish"))
    assert not told["torch"]
    assert told["cpu"] <= 5.0, "ten key presses"


def test_folders_on_the_way_to_a_run_are_offered(folder: Path) -> None:
    assert _completion.complete_run_folders("ru") == ["runs/"]
    assert _completion.complete_run_folders("runs/") == ["runs/first", "runs/second"]
    assert _completion.complete_run_folders("runs/n") == ["runs/no_run/"]
    assert _completion.complete_run_folders(f"{folder}/runs/s") == [f"{folder}/runs/second"]
    assert _completion.complete_run_folders("no_folder/x") == []
    shutil.rmtree(folder / "runs")
    assert _completion.complete_run_folders("") == []


def test_recipes_are_the_shipped_ones_then_files(folder: Path) -> None:
    offered = _completion.complete_recipes("")
    assert offered[: len(list_recipe_names())] == list_recipe_names()
    assert offered[len(list_recipe_names()) :] == ["mine.yaml", "runs/"]
    assert _completion.complete_recipes("notes") == []


def test_names_that_a_terminal_could_not_show_are_not_offered(folder: Path) -> None:
    assert _completion.complete_run_folders("runs/e") == []
    assert (folder / "runs" / "esc\x1b[2J").is_dir()


def test_a_large_folder_makes_nobody_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_completion, "MOST", 3)
    monkeypatch.chdir(folder / "runs")
    for number in range(20):
        os.mkdir(f"many{number}")
    assert len(_completion.complete_run_folders("m")) <= 3
