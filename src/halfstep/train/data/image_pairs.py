"""Images and the conditions that they are asked for with, in two folders, paired by their names."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import BadData
from halfstep.train.data.pairs import Paired
from halfstep.train.data.reading import read_image
from halfstep.train.data.source import Sample

RULE = "the condition of images/a.png is conditions/a.png, or a.jpg, a.tif, ..."


class ImagePairs(Paired):
    """`image` and `condition`, each as it was read: of any size, and of one form, for what lies where must fit."""

    def __init__(
        self, images: str | Path, conditions: str | Path, channels: int = 3, condition_channels: int = 1
    ) -> None:
        super().__init__(images, conditions, "condition", RULE)
        self.channels, self.condition_channels = channels, condition_channels

    def read(self, index: int) -> Sample:
        image = read_image(self.places(index)[0], self.channels)
        rest = self.without_image(index)
        _same_form(image.shape[-2:], rest["condition"].shape[-2:], self.name(index))
        return {"image": image, **rest}

    def without_image(self, index: int) -> Sample:
        return {"condition": read_image(self.places(index)[1], self.condition_channels)}


def _same_form(image: tuple[int, ...], condition: tuple[int, ...], name: str) -> None:
    """A smaller condition is rounded to whole pixels, so its form may be off by one of them."""
    (high, wide), (other_high, other_wide) = image, condition
    if abs(high * other_wide - wide * other_high) > max(*image, *condition):
        raise BadData(
            f"{name} is {wide} × {high} pixels, and its condition {other_wide} × {other_high}",
            allowed="a condition of the size of its image, or of any other with the same height for its width",
            do="cut or turn one of them, or take the pair away",
        )
