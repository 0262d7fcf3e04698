"""The pictures that a small diffusion model learns: what they show is plain to see."""

from __future__ import annotations

import torch

from halfstep.data.synthetic.shapes import ShapePictures


def test_a_picture_is_one_bright_shape_on_black_and_the_same_every_time() -> None:
    drawn, again = ShapePictures(40, 16), ShapePictures(40, 16)
    for index in range(40):
        sample = drawn.read(index)
        image = sample["image"]
        assert torch.equal(image, again.read(index)["image"])
        assert (image.shape, image.dtype) == ((3, 16, 16), torch.uint8)
        corners = image[:, [0, 0, -1, -1], [0, -1, 0, -1]]
        assert image.float().amax() > 190
        assert (image > 127).any(0).float().mean() > 0.15, "large"
        if drawn.classes[int(sample["label"])] != "triangle":
            assert corners.float().amax() < 60


def test_kinds_are_further_apart_than_pictures_of_one_kind() -> None:
    drawn = ShapePictures(80, 16)
    images = torch.stack([drawn.read(index)["image"].float() for index in range(80)])
    labels = torch.tensor([int(drawn.read(index)["label"]) for index in range(80)])
    distances = torch.cdist(images.flatten(1), images.flatten(1))
    nearest = (distances + torch.eye(80) * 1e9).argmin(1)
    assert torch.equal(labels[nearest], labels)
