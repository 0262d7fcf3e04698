"""The folder of a run: made once, never shared, never overwritten."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import FolderTaken, HalfstepError, StateMismatch, Unsafe
from halfstep.files import write_json
from halfstep.recipe.changes import Change
from halfstep.recipe.resolve import ResolvedRecipe, resolve_recipe
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.recipe.strict_yaml import parse_yaml
from halfstep.train import run_folder
from halfstep.train.run_folder import (
    FILES,
    FOLDERS,
    LOCK,
    RECIPE,
    RESULT,
    RunFolder,
    is_finished,
    open_run,
    write_run_recipe,
)

SCHEMA: Any = Recipe[ModelOptions, DataOptions, LossOptions]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(**train: Any) -> ResolvedRecipe:
    return resolve_recipe({"task": "t", "train": {"epochs": 1, **train}}, SCHEMA, [], "mine")


def opened(found: ResolvedRecipe, new: bool = False, accepted: tuple[str, ...] = ()) -> RunFolder:
    """As a run that ends at once would find the folder."""
    run = open_run(found.recipe, "mine", new, drawn=found.drawn, accepted=accepted)
    run.lock.release()
    return run


def refusal(found: ResolvedRecipe, kind: type[HalfstepError] = FolderTaken) -> str:
    with pytest.raises(kind) as caught:
        opened(found)
    assert caught.value.exit_code == {FolderTaken: 73, StateMismatch: 79, Unsafe: 77}[kind]
    return str(caught.value)


def test_an_absent_or_empty_folder_becomes_the_runs(tmp_path: Path) -> None:
    run = opened(resolved(seed=5))
    assert (run.path, run.state) == (Path("runs/mine"), "new")
    assert SCHEMA.model_validate(parse_yaml((run.path / RECIPE).read_bytes(), "recipe")) == run.recipe
    (tmp_path / "empty").mkdir()
    found = resolve_recipe({"task": "t", "train": {"epochs": 1}, "run": {"dir": "empty"}}, SCHEMA, [], "mine")
    assert opened(found).path == Path("empty")
    assert sorted(os.listdir("empty")) == [LOCK, RECIPE]


@pytest.mark.wording
def test_an_unfinished_run_and_a_finished_one_are_told_apart() -> None:
    path = opened(resolved()).path
    assert opened(resolved()).state == "unfinished"
    assert not is_finished(path)
    (path / RESULT).write_text('{"metrics": ')
    assert opened(resolved()).state == "unfinished", "half a result is none"
    write_json(path / RESULT, {"metrics": {}})
    assert is_finished(path)
    said = refusal(resolved())
    assert "finished" in said
    assert "halfstep evaluate runs/mine" in said
    assert "fit(..., new=True)" in said


@pytest.mark.wording
def test_a_run_keeps_the_seed_that_it_drew_and_a_given_one_is_another_recipe() -> None:
    first = resolved()
    opened(first)
    assert resolved().recipe.train.seed != first.recipe.train.seed
    assert opened(resolved()).recipe.train.seed == first.recipe.train.seed
    assert f"train.seed: {first.recipe.train.seed} -> 7" in refusal(resolved(seed=7), StateMismatch)
    assert opened(resolved(seed=first.recipe.train.seed)).state == "unfinished"


@pytest.mark.wording
def test_another_recipe_is_refused_with_the_difference_or_accepted() -> None:
    path = opened(resolved(seed=1)).path
    other = resolved(seed=1, batch_size=2, compile=True)
    before = (path / RECIPE).read_bytes()
    said = refusal(other, StateMismatch)
    # Whether a step still has as many samples depends on the ranks that saved it: the checkpoint decides.
    assert "train.batch_size" not in said
    assert "train.compile: false -> true" in said
    assert "run.dir" not in said
    assert "fit(..., accept_recipe_change=True)" in said
    assert (path / RECIPE).read_bytes() == before
    taken = opened(other, accepted=("recipe",))
    assert taken.changed == [Change("train.compile", False, True)]
    assert (path / RECIPE).read_bytes() == before, "it is the run's recipe only when it is found to fit"
    write_run_recipe(path, taken.recipe)
    assert opened(other).changed == []
    write_json(path / RESULT, {})
    assert "another recipe" in refusal(resolved(seed=1))


def test_settings_that_change_no_bit_need_no_word() -> None:
    path = opened(resolved(seed=1)).path
    found = opened(resolved(seed=1, num_workers=3))
    assert (found.state, found.changed) == ("unfinished", [])
    write_run_recipe(path, found.recipe)
    assert parse_yaml((path / RECIPE).read_bytes(), "recipe")["train"]["num_workers"] == 3


@pytest.mark.wording
def test_a_long_difference_is_cut() -> None:
    path = opened(resolved()).path
    (path / RECIPE).write_text("\n".join(f"k{n}: {n}" for n in range(300)))
    said = refusal(resolved(), StateMismatch)
    assert len(said.splitlines()) <= 23
    assert " more" in said


@pytest.mark.wording
@pytest.mark.parametrize("content", [b"", b"a: !!python/name:os.system", b"\xff", b"a: [", b"x" * 2_000_000, None])
def test_a_folder_of_something_else_is_left_alone(content: bytes | None) -> None:
    os.makedirs("runs/mine")
    if content is None:
        os.mkfifo(f"runs/mine/{RECIPE}")
    else:
        Path("runs/mine", RECIPE).write_bytes(content)
    assert "contains files" in refusal(resolved())
    assert os.listdir("runs/mine") == [RECIPE]


@pytest.mark.wording
@pytest.mark.parametrize("name", [*FILES[1:], *FOLDERS])
def test_what_a_run_writes_into_is_its_own(name: str) -> None:
    path = opened(resolved(seed=1)).path
    kind = "folder" if name in FOLDERS else "file"
    (path / name).symlink_to("nowhere")
    assert f"{path / name} is a link" in refusal(resolved(seed=1), Unsafe)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert f"{path / name} is no {kind}" in refusal(resolved(seed=1), Unsafe)
    (path / name).unlink()
    (path / name).mkdir() if kind == "folder" else (path / name).touch()
    assert opened(resolved(seed=1)).state == "unfinished"


@pytest.mark.wording
def test_a_folder_with_any_file_is_taken() -> None:
    os.makedirs("runs/mine")
    Path("runs/mine/notes.txt").write_text("mine")
    assert "contains files" in refusal(resolved())
    assert os.listdir("runs/mine") == ["notes.txt"]


def test_new_numbers_another(tmp_path: Path) -> None:
    paths = [opened(resolved(), new=True).path for _ in range(3)]
    assert paths == [Path("runs/mine"), Path("runs/mine-2"), Path("runs/mine-3")]
    assert parse_yaml((paths[2] / RECIPE).read_bytes(), "recipe")["run"]["dir"] == "runs/mine-3"


@pytest.mark.wording
def test_files_in_the_way() -> None:
    os.makedirs("runs")
    Path("runs/mine").write_text("")
    assert "is a file" in refusal(resolved())
    assert opened(resolved(), new=True).path == Path("runs/mine-2")
    Path("file").write_text("")
    found = resolve_recipe({"task": "t", "train": {"epochs": 1}, "run": {"dir": "file/inside"}}, SCHEMA, [], "mine")
    assert "cannot be created" in refusal(found)
    long = resolve_recipe({"task": "t", "train": {"epochs": 1}, "run": {"dir": "x" * 5000}}, SCHEMA, [], "mine")
    assert "cannot be created" in refusal(long)


@pytest.mark.wording
def test_a_disk_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, for whom no folder is read-only.
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_text", full)
    assert "No space left on device" in refusal(resolved())


def _race(new: bool, gate: Any, answers: Any) -> None:
    found = resolved()
    gate.wait()
    try:
        run = open_run(found.recipe, "mine", new, drawn=found.drawn)
        answers.put(str(run.path))
    except FolderTaken:
        answers.put("taken")
    gate.wait()  # or a lock would be free again before all have asked for it


@pytest.mark.parametrize(
    ("new", "prepared"),
    [(False, False), (True, True), *(pytest.param(n, not n, marks=pytest.mark.full) for n in (False, True))],
)
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
