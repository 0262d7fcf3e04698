"""`--pretrained`: model.weights=pretrained, and a model that has such weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from halfstep.cli.main import build


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["segmentation_tiny"], "smp-unet"),
        (["segmentation_tiny", "model.name=fpn"], "fpn"),
        (["classification_tiny"], None),
    ],
)
def test_the_resolved_recipe_begins_with_pretrained_weights(words: list[str], name: str | None) -> None:
    before = yaml.safe_load(halfstep("train", *words, "--show").stdout)["model"]
    done = halfstep("train", *words, "--pretrained", "--show")
    assert done.exit_code == 0, done.output
    model = yaml.safe_load(done.stdout)["model"]
    assert model == {**before, "weights": "pretrained", "name": name or before["name"]}


@pytest.mark.wording
def test_the_classic_unet_by_name_is_refused_with_what_to_type(tmp_path: Path) -> None:
    words = ["model.name=unet", "--pretrained", f"run.dir={tmp_path / 'run'}"]
    done = halfstep("train", "segmentation_tiny", *words)
    assert done.exit_code == 78
    assert "model.name=smp-unet" in done.stderr
