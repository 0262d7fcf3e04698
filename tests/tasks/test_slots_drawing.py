"""Slots laid over frames: every slot in a color of its own, in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halfstep.tasks.shared.images import list_class_colors
from halfstep.tasks.slots import GAP, MOST_FRAMES, draw_clip_picture, draw_slot_overlays


def gray(count: int, high: int = 4, wide: int = 6) -> list[np.ndarray]:
    return [np.full((high, wide, 3), 100 + n, np.uint8) for n in range(count)]


def test_every_pixel_has_the_colour_of_its_slot() -> None:
    mask = torch.arange(24).view(1, 4, 6) % 7
    (picture,) = draw_slot_overlays(gray(1), mask, 7)
    for slot in range(7):
        expected = (np.array(list_class_colors(8)[slot + 1]) + 100) // 2
        assert (picture[mask[0].numpy() == slot] == expected).all()


@pytest.mark.parametrize("slots", [7, 24, 32])
def test_slots_have_different_colours(slots: int) -> None:
    mask = np.arange(slots).reshape(1, 1, slots)
    (picture,) = draw_slot_overlays([np.zeros((1, slots, 3), np.uint8)], mask, slots)
    colors = picture[0].astype(int)
    apart = np.abs(colors[:, None] - colors[None]).sum(-1) + 999 * np.eye(slots, dtype=int)
    assert apart.min() >= 8


def test_one_slot_has_one_hue_whatever_it_covers() -> None:
    red_and_blue = np.zeros((1, 2, 3), np.uint8)
    red_and_blue[0, 0, 0] = red_and_blue[0, 1, 2] = 240
    (picture,) = draw_slot_overlays([red_and_blue], torch.zeros(1, 1, 2).long(), 3)
    assert picture[0, 0].tolist() == picture[0, 1].tolist()


def test_arrays_and_tensors_are_drawn_alike() -> None:
    mask = np.random.default_rng(0).integers(0, 3, (2, 4, 6)).astype(np.uint8)
    one, other = draw_slot_overlays(gray(2), mask, 3), draw_slot_overlays(gray(2), torch.from_numpy(mask), 3)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_row_of_frames_over_a_row_of_slots_over_the_truth() -> None:
    frames, mask, truth = gray(3), torch.zeros(3, 4, 6).long(), torch.zeros(3, 4, 6, dtype=torch.uint8)
    truth[1] = 2
    picture = draw_clip_picture(frames, mask, 4, truth)
    assert picture.shape == (3 * 4 + 2 * GAP, 3 * 6 + 2 * GAP, 3)
    assert picture.dtype == np.uint8
    for n in range(3):
        left = n * (6 + GAP)
        assert (picture[:4, left : left + 6] == 100 + n).all()
        assert np.array_equal(picture[4 + GAP : 8 + GAP, left : left + 6], draw_slot_overlays(frames, mask, 4)[n])
        expected = list_class_colors(3)[2] if n == 1 else (0, 0, 0)
        assert (picture[8 + 2 * GAP :, left : left + 6] == expected).all()
    assert draw_clip_picture(frames, mask, 4).shape == (2 * 4 + GAP, 3 * 6 + 2 * GAP, 3)


def test_long_clips_are_shown_from_end_to_end() -> None:
    frames = gray(40)
    picture = draw_clip_picture(frames, torch.zeros(40, 4, 6).long(), 2)
    assert picture.shape[1] == MOST_FRAMES * 6 + (MOST_FRAMES - 1) * GAP
    assert (picture[0, 0] == 100).all()
    assert (picture[0, -1] == 139).all()


def test_fewer_masks_than_frames_are_an_error() -> None:
    with pytest.raises(ValueError):
        draw_slot_overlays(gray(3), torch.zeros(2, 4, 6), 2)
