"""The folder of a run: made once, never shared, never overwritten."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import FolderTaken
from halfstep.files import write_json
from halfstep.train import run_folder
from halfstep.train.recipe.resolve import Resolved, resolve
from halfstep.train.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.run_folder import RECIPE, RESULT, RunFolder, is_finished, open_run

SCHEMA: Any = Recipe[ModelOptions, DataOptions, LossOptions]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(**train: Any) -> Resolved:
    return resolve({"task": "t", "train": {"epochs": 1, **train}}, SCHEMA, [], "mine")


def opened(found: Resolved, new: bool = False) -> RunFolder:
    return open_run(found.recipe, "mine", new, drawn=found.drawn)


def refusal(found: Resolved) -> str:
    with pytest.raises(FolderTaken) as caught:
        opened(found)
    assert caught.value.exit_code == 73
    return str(caught.value)


def test_an_absent_or_empty_folder_becomes_the_runs(tmp_path: Path) -> None:
    run = opened(resolved(seed=5))
    assert (run.path, run.state) == (Path("runs/mine"), "new")
    assert SCHEMA.model_validate(read_yaml((run.path / RECIPE).read_bytes(), "recipe")) == run.recipe
    (tmp_path / "empty").mkdir()
    found = resolve({"task": "t", "train": {"epochs": 1}, "run": {"dir": "empty"}}, SCHEMA, [], "mine")
    assert opened(found).path == Path("empty")
    assert sorted(os.listdir("empty")) == [RECIPE]


def test_an_interrupted_run_and_a_finished_one_are_told_apart() -> None:
    path = opened(resolved()).path
    assert "interrupted" in refusal(resolved())
    assert not is_finished(path)
    (path / RESULT).write_text('{"metrics": ')
    assert "interrupted" in refusal(resolved()), "half a result is none"
    write_json(path / RESULT, {"metrics": {}})
    assert is_finished(path)
    said = refusal(resolved())
    assert "finished" in said
    assert "halfstep evaluate runs/mine" in said
    assert "--new" in said


def test_a_drawn_seed_makes_no_difference_and_a_given_one_does() -> None:
    first = resolved()
    opened(first)
    assert "interrupted" in refusal(resolved())
    assert f"train.seed: {first.recipe.train.seed} -> 7" in refusal(resolved(seed=7))
    assert "interrupted" in refusal(resolved(seed=first.recipe.train.seed))


def test_another_recipe_is_refused_with_the_difference() -> None:
    opened(resolved(seed=1))
    said = refusal(resolved(seed=1, batch_size=2, compile=True))
    assert "train.batch_size: 16 -> 2" in said
    assert "train.compile: false -> true" in said
    assert "run.dir" not in said


def test_a_long_difference_is_cut() -> None:
    path = opened(resolved()).path
    (path / RECIPE).write_text("\n".join(f"k{n}: {n}" for n in range(300)))
    said = refusal(resolved())
    assert len(said.splitlines()) <= 23
    assert " more" in said


@pytest.mark.parametrize("content", [b"", b"a: !!python/name:os.system", b"\xff", b"a: [", b"x" * 2_000_000, None])
def test_a_folder_of_something_else_is_left_alone(content: bytes | None) -> None:
    os.makedirs("runs/mine")
    if content is None:
        os.mkfifo(f"runs/mine/{RECIPE}")
    else:
        Path("runs/mine", RECIPE).write_bytes(content)
    assert "holds files" in refusal(resolved())
    assert os.listdir("runs/mine") == [RECIPE]


def test_a_folder_with_any_file_is_taken() -> None:
    os.makedirs("runs/mine")
    Path("runs/mine/notes.txt").write_text("mine")
    assert "holds files" in refusal(resolved())
    assert os.listdir("runs/mine") == ["notes.txt"]


def test_new_numbers_another(tmp_path: Path) -> None:
    paths = [opened(resolved(), new=True).path for _ in range(3)]
    assert paths == [Path("runs/mine"), Path("runs/mine-2"), Path("runs/mine-3")]
    assert read_yaml((paths[2] / RECIPE).read_bytes(), "recipe")["run"]["dir"] == "runs/mine-3"


def test_files_in_the_way() -> None:
    os.makedirs("runs")
    Path("runs/mine").write_text("")
    assert "is a file" in refusal(resolved())
    assert opened(resolved(), new=True).path == Path("runs/mine-2")
    Path("file").write_text("")
    found = resolve({"task": "t", "train": {"epochs": 1}, "run": {"dir": "file/inside"}}, SCHEMA, [], "mine")
    assert "cannot be made" in refusal(found)
    long = resolve({"task": "t", "train": {"epochs": 1}, "run": {"dir": "x" * 5000}}, SCHEMA, [], "mine")
    assert "cannot be made" in refusal(long)


def test_a_disk_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, for whom no folder is read-only.
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_text", full)
    assert "No space left on device" in refusal(resolved())


def test_a_file_system_without_links_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    assert os.listdir(opened(resolved()).path) == [RECIPE]


def _race(new: bool, gate: Any, answers: Any) -> None:
    found = resolved()
    gate.wait()
    try:
        answers.put(str(opened(found, new).path))
    except FolderTaken:
        answers.put("taken")


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_two_that_start_at_once_never_share(new: bool, prepared: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        os.mkdir(str(attempt))
        os.chdir(str(attempt))
        if prepared:
            os.makedirs("runs/mine")
        gate, answers = context.Barrier(3), context.SimpleQueue()
        racers = [context.Process(target=_race, args=(new, gate, answers)) for _ in range(3)]
        for racer in racers:
            racer.start()
        found = sorted(answers.get() for _ in racers)
        for racer in racers:
            racer.join()
        os.chdir(tmp_path)
        if new:
            assert len(set(found)) == 3
            assert "taken" not in found
        else:
            assert found == ["runs/mine", "taken", "taken"]
