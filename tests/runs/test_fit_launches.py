"""Launch after launch of one run: what a refused, broken or killed one leaves, the next one finds right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfstep
from halfstep.errors import StateMismatch
from halfstep.recipe.strict_yaml import parse_yaml
from halfstep.train.run import Run
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


class Halt(Exception):
    """Ends a launch in the middle."""


def halting(after: int, first: Any = None) -> type[Tiny]:
    """A task that does something at its first loss, and ends its launch at a later one."""

    class Halting(Tiny):
        calls = 0

        def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
            type(self).calls += 1
            if type(self).calls == 1 and first is not None:
                first()
            if type(self).calls > after:
                raise Halt
            return super().loss(model, batch, metrics)

    return Halting


def fit(recipe: Path, task: Any = Tiny, *, accept: bool = False, **settings: Any) -> Run:
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    changed = {"run.dir": str(recipe.parent / "run"), "checkpoint.every_steps": 2, **changed}
    return halfstep.fit(recipe, task=task, settings=changed, quiet=True, accept_recipe_change=accept)


def test_a_run_that_has_saved_keeps_its_folder_whatever_becomes_of_its_journal(recipe: Path) -> None:
    folder = recipe.parent / "run"

    def lose_it() -> None:
        (folder / "journal.jsonl").unlink()

    with pytest.raises(Halt):
        fit(recipe, halting(5, lose_it))
    assert list((folder / "checkpoints").iterdir())
    assert fit(recipe).steps == 16


def test_a_recipe_that_was_being_written_when_the_run_was_killed_is_in_nobodys_way(recipe: Path) -> None:
    folder = recipe.parent / "run"
    folder.mkdir()
    (folder / ".recipe.yaml.4711").write_text("task: ti")
    assert fit(recipe).steps == 16
    assert not (folder / ".recipe.yaml.4711").exists()


def test_weights_to_begin_with_are_needed_once(recipe: Path) -> None:
    weights = recipe.parent / "begin.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in Tiny(_whole(recipe)).model().state_dict().items()}, weights
    )
    given = {"model__weights": str(weights)}
    whole = fit(recipe, run__dir=str(recipe.parent / "whole"), **given)
    with pytest.raises(Halt):
        fit(recipe, halting(7), **given)
    weights.unlink()
    gone_on = fit(recipe, **given)
    one, other = (load_file(run.dir / "last.safetensors") for run in (whole, gone_on))
    assert all(torch.equal(one[name], other[name]) for name in one)


def _whole(recipe: Path) -> Any:
    return Tiny.schema.model_validate({"model": {}, "data": {}, "loss": {}, **parse_yaml(recipe.read_bytes(), "tiny")})


@pytest.mark.wording
def test_a_change_that_does_not_fit_leaves_the_run_as_it_was(recipe: Path) -> None:
    with pytest.raises(Halt):
        fit(recipe, halting(5))
    before = (recipe.parent / "run" / "recipe.yaml").read_bytes()
    with pytest.raises(StateMismatch, match="SGD"):
        fit(recipe, accept=True, optimizer__name="adamw")
    assert (recipe.parent / "run" / "recipe.yaml").read_bytes() == before
    assert fit(recipe).steps == 16


@pytest.mark.wording
def test_a_change_is_accepted_once_and_holds_from_then_on(recipe: Path) -> None:
    with pytest.raises(Halt):
        fit(recipe, halting(5))
    with pytest.raises(Halt):
        fit(recipe, halting(0), accept=True, optimizer__lr=0.01)
    with pytest.raises(StateMismatch, match=r"optimizer\.lr: 0\.01 -> 0\.05"):
        fit(recipe)
    run = fit(recipe, optimizer__lr=0.01)
    assert [event["lr"] for event in events(run, "step")] == [0.05] * 4 + [0.01] * 12
    assert [bool((event["resumed"] or {}).get("changed")) for event in events(run, "start")] == [False, True, False]
