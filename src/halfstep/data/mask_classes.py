"""Infer the classes of a set's masks from the values in them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from halfstep.data.image_files import Numbers, read_mask_values

NO_CLASS = 255
"""The value of pixels without a class, in sets with class numbers."""
MOST_VALUES = 32
"""More values or colors than this are not classes but shades between them."""
KEPT_VALUES = 256
"""Different values of one mask that are counted; a photograph instead of a mask has millions."""
RARE = 0.02
"""A value in a smaller share of the masks may be a mistake."""
_MOST_CLASSES = 255

Color = tuple[int, int, int]


@dataclass(frozen=True)
class MaskCounts:
    """The pixels of one mask by value; a color is red · 65536 + green · 256 + blue."""

    pixels: Mapping[int, int]
    in_color: bool = False
    is_indexed: bool = False
    """Whether the values are palette indices, which are class numbers."""

    @property
    def form(self) -> str:
        """The form that the mask alone suggests; empty if it is all background."""
        if not set(self.pixels) - {0}:
            return ""
        if self.in_color:
            return "colours" if len(self.pixels) <= MOST_VALUES else "shades"
        # Many different values are class numbers if they are dense, and shades where they are spread out.
        many = len(self.pixels) > MOST_VALUES and max(self.pixels) >= min(200, 2 * len(self.pixels))
        if many or max(self.pixels) > 255:
            return "shades"
        return "black and white" if set(self.pixels) <= {0, 255} else "numbers"


def count_mask_values(image: Any) -> MaskCounts:
    """Count the values of an open mask; gray in three channels is gray."""
    values = read_mask_values(image)
    if values.ndim == 3 and (values[..., 0] == values[..., 1]).all() and (values[..., 0] == values[..., 2]).all():
        values = values[..., 0]
    if values.ndim == 2:
        return MaskCounts(_count_values(values), is_indexed=image.mode == "P")
    wide = values.astype(np.int32)
    return MaskCounts(_count_values((wide[..., 0] << 16) + (wide[..., 1] << 8) + wide[..., 2]), in_color=True)


def _count_values(values: Numbers) -> dict[int, int]:
    # For uint8, counting is faster than the sort in np.unique.
    if values.dtype == np.uint8:
        pixels: Any = np.bincount(values.ravel(), minlength=256)
        return {int(value): int(pixels[value]) for value in np.flatnonzero(pixels)}
    found, pixels = np.unique(values, return_counts=True)
    return {int(value): int(n) for value, n in zip(found[:KEPT_VALUES], pixels[:KEPT_VALUES], strict=True)}


@dataclass(frozen=True)
class MaskReading:
    """How masks are read, in words and as recipe settings."""

    classes: int
    words: str
    ignore_index: int | None = None
    palette: tuple[Color, ...] | None = None

    def settings(self) -> dict[str, object]:
        """Return the settings of a recipe's `data` section."""
        palette = None if self.palette is None else [list(color) for color in self.palette]
        return {"classes": self.classes, "ignore_index": self.ignore_index, "palette": palette}

    def class_of(self, value: int, mask: MaskCounts) -> int | None:
        """Return the class of a value of this mask; None if it has none."""
        if self.palette is not None:
            color = decode_color(value) if mask.in_color else (value, value, value)
            return self.palette.index(color) if color in self.palette else None
        if mask.in_color or value == self.ignore_index:
            return None
        if self.classes == 2 and self.ignore_index != NO_CLASS and set(mask.pixels) <= {0, 255}:
            return int(value == 255)
        return value if 0 <= value < self.classes else None

    def strange(self, mask: MaskCounts) -> list[int]:
        """Return the values of a mask that have no class and are not ignored."""
        ignored = None if mask.in_color or self.palette else self.ignore_index
        return [value for value in mask.pixels if value != ignored and self.class_of(value, mask) is None]


def infer_mask_reading(
    masks: Sequence[MaskCounts], classes: int | None = None, ignore_index: int | None = None
) -> MaskReading:
    """Return how a set of such masks is read; the most frequent form decides.

    `classes` and `ignore_index` are the user's numbers.
    """
    forms = Counter(mask.form for mask in masks if mask.form)
    usual = forms.most_common(1)[0][0] if forms else "black and white"
    alike = [mask for mask in masks if mask.form == usual]
    if usual == "black and white":
        if (classes or 2) != 2 or ignore_index is not None:
            return _build_number_reading(classes, ignore_index)
        ones = sum(not mask.in_color and 1 in mask.pixels and set(mask.pixels) <= {0, 1} for mask in masks)
        white = f"255 (in {ones} masks 1)" if ones else "255"
        return MaskReading(2, f"0 is the background, {white} the foreground")
    if usual == "numbers":
        return _infer_number_classes(alike, classes, ignore_index)
    if usual == "colours":
        return _infer_color_classes(masks)
    return MaskReading(classes or 2, "shades between classes, which belong to none")


def _infer_number_classes(
    masks: Sequence[MaskCounts], classes: int | None, ignore_index: int | None = None
) -> MaskReading:
    present, common = _collect_mask_values(masks)
    ignored = NO_CLASS if NO_CLASS in common and (classes or 0) <= NO_CLASS else None
    ignored = ignored if ignore_index is None else ignore_index
    if classes is not None:
        return _build_number_reading(classes, ignored)
    numbers = sorted(value for value in common if value != ignored)
    count = max(numbers, default=0) + 1
    # A rare class counts where no number below it is missing; a single distant value is a mistake in its mask.
    count += len(list(takewhile(lambda value: value in present, range(count, NO_CLASS))))
    # Sparse values such as 0, 85, 170 are grays for display, not class numbers; palette indices are always numbers.
    is_dense = count <= max(2 * len(numbers) + 2, 4)
    if is_dense or ignore_index is not None or any(mask.is_indexed for mask in masks):
        return _build_number_reading(max(count, 2), ignored)
    palette = tuple((value, value, value) for value in sorted(common))
    if len(palette) < 2:
        return MaskReading(2, f"nothing but {palette[0][0]}")
    return MaskReading(len(palette), _describe_values("grays", [c[0] for c in palette]), palette=palette)


def _collect_mask_values(masks: Iterable[MaskCounts]) -> tuple[set[int], set[int]]:
    """Return the values in these masks, and those that are not rare."""
    found = Counter(value for mask in masks for value in mask.pixels)
    total = max(found.values(), default=0)
    # With fewer than ten masks, no value can be called rare.
    few = max(1, int(RARE * total)) if total >= 10 else 0
    return set(found), {value for value, times in found.items() if times > few}


def _build_number_reading(count: int | None, ignored: int | None = None) -> MaskReading:
    classes = count or 2
    words = f"class numbers, 0 to {classes - 1}"
    words += f"; {ignored} belongs to no class" if ignored is not None else ""
    return MaskReading(classes, words, ignore_index=ignored)


def _infer_color_classes(masks: Sequence[MaskCounts]) -> MaskReading:
    counts: Counter[Color] = Counter()
    for mask in masks:
        if mask.form in ("colours", ""):
            for value, pixels in mask.pixels.items():
                counts[decode_color(value) if mask.in_color else (value, value, value)] += pixels
    if not 2 <= len(counts) <= min(MOST_VALUES, _MOST_CLASSES):
        return MaskReading(2, f"{len(counts)} different colors, which are not classes")
    # Class 0 is the background by convention: black, or else the most frequent color.
    background = (0, 0, 0) if (0, 0, 0) in counts else counts.most_common(1)[0][0]
    palette = (background, *sorted(color for color in counts if color != background))
    return MaskReading(len(palette), _describe_values("colours", [list(c) for c in palette]), palette=palette)


def _describe_values(kind: str, values: Sequence[Any]) -> str:
    first = ", ".join(f"{value} is class {number}" for number, value in enumerate(values[:4]))
    return f"{kind}: {first}{f' and {len(values) - 4} more' if len(values) > 4 else ''}"


def decode_color(code: int) -> Color:
    """Return red, green and blue of a color code."""
    return code >> 16, code >> 8 & 255, code & 255
