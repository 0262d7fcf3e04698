"""Photographs that are larger than `data.max_side`: small in training, and answered in their own size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from halfstep.data.folders import ImageMaskPairs
from halfstep.tasks.shared.images import ShrunkSource, shrink_image_and_mask
from halfstep.train.signature import Preprocessing
from tests.tasks.made import made


def at_most(side: int | None) -> Preprocessing:
    return Preprocessing(3, (0.5,) * 3, (0.25,) * 3, max_side=side)


def set_of(root: Path, count: int = 3) -> Path:
    for kind in ("images", "masks"):
        (root / kind).mkdir()
    for number in range(count):
        mask = np.zeros((60, 90), np.uint8)
        mask[20:40, 30:60] = 255
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
        Image.fromarray(np.repeat(mask[..., None], 3, 2)).save(root / "images" / f"{number}.png")
    return root


def test_image_and_mask_shrink_together() -> None:
    image, mask = torch.zeros(3, 60, 90, dtype=torch.uint8), torch.zeros(60, 90, dtype=torch.uint8)
    image[:, 20:40, 30:60], mask[20:40, 30:60] = 255, 1
    small, classes = shrink_image_and_mask(image, mask, at_most(30))
    assert small.shape == (3, 20, 30)
    assert classes.shape == (20, 30)
    assert set(classes.unique().tolist()) == {0, 1}
    assert torch.equal(small[0] > 127, classes == 1)
    assert shrink_image_and_mask(image, mask, at_most(None))[0] is image
    assert shrink_image_and_mask(image, mask, at_most(90))[0] is image
    deep = shrink_image_and_mask(torch.full((1, 60, 90), 65535, dtype=torch.uint16), mask, at_most(30))[0]
    assert torch.allclose(deep, torch.ones(1, 20, 30))


def test_a_photograph_is_decoded_once(tmp_path: Path) -> None:
    set_of(tmp_path)
    source = ShrunkSource(ImageMaskPairs(tmp_path / "images", tmp_path / "masks"), at_most(30))
    first = source.read(1)
    for kind in ("images", "masks"):
        (tmp_path / kind / "1.png").unlink()
    assert source.read(1) is first
    assert (len(source), source.key(0)) == (3, "0.png")
    assert len(list(source.files_of(0))) == 2


def test_a_prediction_has_the_size_of_its_photograph(tmp_path: Path) -> None:
    data = {"path": str(set_of(tmp_path)), "name": "pairs", "max_side": 32, "crop": 32, "tile": 32, "overlap": 8}
    task = made("segmentation", data={**data, "classes": 2})
    assert task.source("train").read(0)["image"].shape[-1] == 32
    model = task.model().eval()
    answer = task.predict(model, torch.zeros(3, 60, 90, dtype=torch.uint8))
    assert answer.mask is not None
    assert answer.mask.shape == (60, 90)
