"""The share that is held out for validation: exact below 1,000 samples, and unchanged in runs of earlier versions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result

import halfstep as package
from halfstep.cli.main import build
from halfstep.data.layout import compute_split_position, select_validation_by_position, select_validation_exactly
from halfstep.recipe import resolve
from halfstep.recipe.changes import list_relevant_changes
from tests.tasks.made import made

IMAGES = 59
WORDS = ["train.batch_size=4", "data.crop=32", "model.width=4", "--fp32", "run.pictures=0", "num_workers=0"]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for kind in ("images", "masks"):
        (root / kind).mkdir()
        for number in range(IMAGES):
            pixels = np.full((32, 32), 255 * (number % 2), np.uint8)
            Image.fromarray(pixels).save(root / kind / f"IMG_{1000 + number}.png")
    return root


def held_out(run: Path) -> int:
    return len(package.load(run, weights="last").task.source("val"))


def test_a_run_holds_out_as_many_as_explain_names(photos: Path, tmp_path: Path) -> None:
    explained = halfstep("recipes", "explain", "segment", photos)
    assert explained.exit_code == 0, explained.output
    said = re.search(r"(\d+) of 59 images are held out", " ".join(explained.output.split()))
    assert said is not None
    done = halfstep("train", "segment", "--data_dir", photos, *WORDS, "train.steps=1", f"run.dir={tmp_path / 'run'}")
    assert done.exit_code == 0, done.output
    assert held_out(tmp_path / "run") == int(said[1]) == round(0.2 * IMAGES) == 12


def test_a_run_that_was_begun_before_keeps_its_split(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["segment", "--data_dir", photos, *WORDS, f"run.dir={run}"]
    with monkeypatch.context() as before:
        before.setattr(resolve, "EXACT", None)
        assert halfstep("train", *words, "train.steps=1").exit_code == 0
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["data"].pop("split") is None
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))  # as an earlier version wrote it
    names = [f"IMG_{1000 + number}.png" for number in range(IMAGES)]
    below = sum(compute_split_position(name) < 0.2 for name in names)
    assert held_out(run) == below != 12
    longer = halfstep("train", *words, "train.steps=2", "--extend")
    assert longer.exit_code == 0, longer.output
    assert held_out(run) == below


def test_settings_that_are_newer_than_a_run_are_no_change() -> None:
    recipe = made("slots").recipe
    saved = recipe.model_dump(mode="json")
    for section, key in (("data", "split"), ("model", "backbone"), ("model", "backbone_weights")):
        del saved[section][key]
    assert list_relevant_changes(saved, recipe) == []
    saved["model"]["slots"] += 1
    assert [one.key for one in list_relevant_changes(saved, recipe)] == ["model.slots"]


@pytest.mark.parametrize("share", [0.001, 0.05, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("samples", [2, 3, 10, 59, 999])
def test_the_share_is_exact_and_neither_side_is_empty(samples: int, share: float) -> None:
    places = [compute_split_position(f"img_{number}.png") for number in range(samples)]
    chosen = select_validation_exactly(places, share)
    assert len(chosen) == min(max(1, round(share * samples)), samples - 1)
    rest = set(range(samples)) - chosen
    assert max(places[number] for number in chosen) < min(places[number] for number in rest)


def test_large_sets_are_split_as_before() -> None:
    places = [compute_split_position(f"img_{number}.png") for number in range(1000)]
    assert select_validation_exactly(places, 0.1) == select_validation_by_position(places, 0.1)
    assert len(select_validation_exactly(places[:999], 0.1)) == 100
