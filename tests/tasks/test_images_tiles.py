"""Tiles: the same as the whole image, without seams, in bounded pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.tasks.shared.images import AT_ONCE, run_in_tiles, run_without_padding


def test_one_tile_is_the_forward_itself() -> None:
    model = nn.Conv2d(3, 2, 3, padding=1)
    images = torch.randn(2, 3, 32, 20)
    assert torch.equal(run_in_tiles(model, images, 32, 8), model(images))


@pytest.mark.parametrize("size", [(33, 33), (70, 31), (1, 65), (128, 96)])
@pytest.mark.parametrize("overlap", [0, 5, 16])
def test_a_model_that_looks_at_one_pixel_is_seen_whole(size: tuple[int, int], overlap: int) -> None:
    model = nn.Conv2d(3, 2, 1)
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(run_in_tiles(model, images, 32, overlap), model(images))


def test_neighbourhoods_agree_away_from_the_edges_of_tiles() -> None:
    model = nn.Conv2d(1, 1, 3, padding=1)
    images = torch.randn(1, 1, 96, 96)
    error = (run_in_tiles(model, images, 48, 24) - model(images)).abs()
    # An edge of a tile, where padding is wrong, counts a thousandth beside the middle of its neighbor.
    assert error.max() < 0.02 * model(images).abs().max()


def test_no_seams() -> None:
    """A model that says another thing in every tile is led smoothly from one to the other."""
    calls = iter(range(100))

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(one[:1], float(next(calls))) for one in x])

    row = run_in_tiles(model, torch.zeros(1, 3, 64, 112), 64, 16)[0, 0, 32]
    assert row[0] == pytest.approx(0.0)
    assert row[-1] == pytest.approx(1.0)
    assert row.diff().min() >= -1e-6
    assert row.diff().max() < 0.2


def test_at_most_a_few_tiles_at_once() -> None:
    seen: list[int] = []

    def model(x: Tensor) -> Tensor:
        seen.append(len(x))
        assert x.shape[-2:] == (32, 32)
        return x

    images = torch.randn(3, 1, 200, 150)
    torch.testing.assert_close(run_in_tiles(model, images, 32, 8), images)
    assert max(seen) <= AT_ONCE
    assert sum(seen) == 3 * 8 * 6


@pytest.mark.parametrize("size", [(1, 1), (31, 33), (64, 65), (100, 40)])
def test_sizes_are_brought_to_the_models_stride_and_back(size: tuple[int, int]) -> None:
    def model(x: Tensor) -> Tensor:
        assert x.shape[-2] % 32 == 0
        assert x.shape[-1] % 32 == 0
        return x * 2

    images = torch.randn(1, 3, *size)
    torch.testing.assert_close(run_in_tiles(model, images, 64, 16, stride=32), images * 2)


def test_sums_of_tiles_are_wide() -> None:
    images = torch.randn(1, 1, 80, 80).to(torch.bfloat16).float()
    out = run_in_tiles(lambda x: x.to(torch.bfloat16), images, 32, 16)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, images)


def test_an_image_is_seen_without_the_padding_of_its_batch() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    images = [torch.randn(1, 9, 7), torch.randn(1, 5, 12), torch.randn(1, 9, 7)]
    padded = torch.stack([F.pad(i, (0, 12 - i.shape[2], 0, 9 - i.shape[1])) for i in images])
    out = run_without_padding(model, padded, [(9, 7), (5, 12), (9, 7)])
    for image, got in zip(images, out, strict=True):
        _, high, wide = image.shape
        torch.testing.assert_close(got[:, :high, :wide], model(image[None])[0])
        assert got[:, high:].abs().sum() == 0
        assert got[:, :, wide:].abs().sum() == 0
