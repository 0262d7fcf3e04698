"""A run opened again: what was edited in it or is missing from it is said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from halfstep.errors import BadData, BadRecipe
from halfstep.files import write_json
from halfstep.runs.finished import open_finished
from halfstep.train.outputs import BEST, FACTS, LAST
from halfstep.train.weights import save_weights
from tests.tasks.made import made


def left(folder: Path, *files: str, **changes: Any) -> torch.nn.Module:
    """A run's folder as training leaves it, with `files` of weights."""
    task = made("segmentation")
    content = task.recipe.model_dump(mode="json")
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**content, **changes}))
    write_json(folder / FACTS, task.facts())
    model = task.model()
    for name in files:
        save_weights(model, folder / name)
    return model


def opened(folder: Path, weights: str = "best") -> Any:
    return open_finished(folder, weights=weights, precision="fp32", own=None)


def test_a_run_is_opened_with_its_weights(tmp_path: Path) -> None:
    model = left(tmp_path, BEST)
    found = opened(tmp_path).model.state_dict()
    assert all(torch.equal(tensor.cpu(), found[name].cpu()) for name, tensor in model.state_dict().items())


@pytest.mark.wording
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nosuch": 1}, "nosuch is not known"),
        ({"loss": {"dice": "much"}}, r"loss\.dice is 'much'"),
        ({"loss": {"dice": "much"}, "nosuch": 1}, "has 2 mistakes"),
    ],
)
def test_a_recipe_that_was_edited(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    left(tmp_path, BEST, **changes)
    with pytest.raises(BadRecipe, match=words) as caught:
        opened(tmp_path)
    assert str(tmp_path / "recipe.yaml") in str(caught.value)
    assert caught.value.do


@pytest.mark.wording
def test_without_a_finite_evaluation_the_last_weights_are_named(tmp_path: Path) -> None:
    left(tmp_path, LAST)
    with pytest.raises(BadData, match="no evaluation of the run was finite") as caught:
        opened(tmp_path)
    assert 'weights="last"' in caught.value.do
    assert opened(tmp_path, "last").weights == tmp_path / LAST


@pytest.mark.wording
def test_without_any_weights(tmp_path: Path) -> None:
    left(tmp_path)
    with pytest.raises(BadData, match="no weights at") as caught:
        opened(tmp_path)
    assert 'weights="last"' not in caught.value.do
