"""`halfstep.load`: a run's model in Python, for images of every kind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import halfstep
from halfstep.data.image_io import convert_to_image_tensor
from halfstep.errors import BadData, WrongUse
from halfstep.files import write_json
from halfstep.train.outputs import BEST, FACTS
from halfstep.train.weights import save_weights
from tests.tasks.made import made


def left(folder: Path, name: str, **sections: Any) -> Path:
    """A run's folder as training leaves it."""
    task = made(name, **sections)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**task.recipe.model_dump(mode="json"), "precision": "fp32"}))
    write_json(folder / FACTS, task.facts())
    save_weights(task.model(), folder / BEST)
    return folder


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 71, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def kinds(photo: Path) -> list[Any]:
    array = np.asarray(Image.open(photo))
    return [photo, str(photo), Image.open(photo), array, torch.from_numpy(array.copy()).permute(2, 0, 1)]


@pytest.mark.parametrize("name", ["segmentation", "classification"])
def test_an_image_of_any_kind_is_predicted_alike(tmp_path: Path, photo: Path, name: str) -> None:
    run = halfstep.load(left(tmp_path, name))
    image = convert_to_image_tensor(photo, 3)
    expected = run.task.predict(run.model, image)
    for given in kinds(photo):
        found = run.predict(given)
        assert found.values == expected.values
        assert found.mask is None or np.array_equal(found.mask, expected.mask)
    assert run.predict(np.float64(np.asarray(Image.open(photo))) / 255).values.keys() == expected.values.keys()
    assert run.classes == run.task.classes
    assert run.precision == "fp32"


def test_model_and_preprocessing_come_to_the_same(tmp_path: Path, photo: Path) -> None:
    run = halfstep.load(str(left(tmp_path, "classification")))
    with torch.no_grad():
        chances = run.model(run.preprocessing(photo)).softmax(1)[0]
    assert run.classes[int(chances.argmax())] == run.predict(photo).values["class"]
    assert float(chances.max()) == pytest.approx(run.predict(photo).values["score"], abs=1e-6)
    assert (run.preprocessing.resize, run.preprocessing.crop, run.preprocessing.order) == (32, 32, "RGB")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((3, 20, 30), np.uint8), "move its channels to the end"),
        (torch.zeros(20, 30, 3, dtype=torch.uint8), "move its channels to the front"),
        (np.zeros((20, 30, 4), np.uint8), "convert it to 3 channels"),
        (torch.zeros(2, 3, 20, 30), "one image at a time"),
        (np.zeros((20, 30, 3), np.int64), "convert it to uint8"),
        (np.zeros((0, 30, 3), np.uint8), "one image at a time"),
        ([1, 2, 3], "the path of a file"),
    ],
)
def test_what_is_no_image_is_told(image: Any, said: str) -> None:
    with pytest.raises(BadData) as caught:
        convert_to_image_tensor(image, 3)
    assert said in str(caught.value)


def test_a_photograph_that_was_not_divided_is_doubted() -> None:
    image = torch.full((3, 4, 4), 255.0)
    with pytest.warns(UserWarning, match="divide it by 255"):
        assert convert_to_image_tensor(image, 3) is image
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_to_image_tensor(image / 255, 3)


def test_pillow_images_lie_as_their_files_do(tmp_path: Path, photo: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(photo).save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as image:
        assert torch.equal(convert_to_image_tensor(image, 3), convert_to_image_tensor(tmp_path / "turned.jpg", 3))


def test_grey_models_take_grey(tmp_path: Path) -> None:
    run = halfstep.load(left(tmp_path, "segmentation", data={"channels": 1}))
    assert run.predict(np.zeros((20, 30), np.uint8)).mask.shape == (20, 30)
    assert run.predict(torch.zeros(20, 30)).mask.shape == (20, 30)


@pytest.mark.wording
def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="contains no run"):
        halfstep.load(tmp_path)
    run = halfstep.load(left(tmp_path, "slots"))
    with pytest.raises(WrongUse, match="does not describe"):
        run.classes  # noqa: B018
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(BadData, match=r"bad\.png"):
        run.predict(tmp_path / "bad.png")
