"""Slots laid over the frames that they divide: beside one another for a page, one after the other for an animation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from halfstep.tasks import _colours
from halfstep.tasks._pixels import side_by_side
from halfstep.train.task import Picture

MOST_FRAMES = 8
"""In a row; of a longer clip they are spread over its length."""
GAP = 2


def overlays(frames: Sequence[Picture], masks: Any, slots: int) -> list[Picture]:
    """Each frame in grey, with the colour of its slot on every pixel; `masks` is frames × height × width, slot numbers.

    In grey, because the colours of things, mixed with those of slots, would tell neither.
    """
    # The first colour is black, for a background. To a slot, the background is a thing like any other.
    return [
        _colours.laid_over(_grey(frame), _numbers(mask) + 1, slots + 1)
        for frame, mask in zip(frames, masks, strict=True)
    ]


def clip_picture(frames: Sequence[Picture], masks: Any, slots: int, truth: Any = None) -> Picture:
    """A row of frames, under it what the slots make of them, and under that the true things, where they are known."""
    shown = np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().astype(int).tolist()
    some = [frames[n] for n in shown]
    rows = [some, overlays(some, [masks[n] for n in shown], slots)]
    if truth is not None:
        most = int(truth.max()) + 1
        things = [_numbers(truth[n]) for n in shown]
        rows.append([_colours.painted(mask, most) for mask in things])
    return _below([side_by_side(row, GAP) for row in rows])


def _grey(frame: Picture) -> Picture:
    picture: Picture = frame.mean(2, keepdims=True).round().astype(np.uint8).repeat(3, 2)
    return picture


def _numbers(mask: Any) -> _colours.Mask:
    """From an array, or from a tensor wherever it is."""
    numbers: _colours.Mask = torch.as_tensor(mask).cpu().long().numpy()
    return numbers


def _below(rows: Sequence[Picture]) -> Picture:
    """Rows of one width, one under the other: columns of the picture that is turned over."""
    return side_by_side([row.swapaxes(0, 1) for row in rows], GAP).swapaxes(0, 1)
