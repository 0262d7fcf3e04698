"""The classic U-Net: any size, any width, and in 16 bits with channels last."""

from __future__ import annotations

import pytest
import torch

from halfstep.tasks.models.unet import UNet


@pytest.mark.parametrize("size", [(1, 1), (7, 13), (16, 16), (33, 64)])
@pytest.mark.parametrize(("width", "depth"), [(4, 1), (4, 4), (6, 2)])
def test_any_size_comes_out_as_it_went_in(size: tuple[int, int], width: int, depth: int) -> None:
    model = UNet(5, 3, width, depth).eval()
    assert model(torch.randn(2, 5, *size)).shape == (2, 3, *size)


def test_it_is_the_classic_one() -> None:
    parameters = sum(p.numel() for p in UNet(3, 2).parameters())
    assert parameters == pytest.approx(31.04e6, rel=0.001)


def test_activations_neither_vanish_nor_explode() -> None:
    model = UNet(3, 1, 16, 4)
    features: list[float] = []
    model.head.register_forward_pre_hook(lambda _, args: features.append(args[0].std().item()))
    out = model(torch.randn(4, 3, 64, 64))
    assert 0.1 < features[0] < 10
    assert 0.05 < out.std() < 2  # classes differ from the first step, and none is certain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_and_channels_last(dtype: torch.dtype) -> None:
    model = UNet(3, 2, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 40, 24).to(memory_format=torch.channels_last)
    wide = model.eval()(x)
    with torch.autocast("cpu", dtype=dtype):
        narrow = model(x)
    assert narrow.dtype is dtype
    assert narrow.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(narrow.float(), wide, atol=0.02, rtol=0.05)


def test_every_pixel_can_see_across_the_image() -> None:
    model = UNet(1, 1, 4, 4).eval()
    x = torch.randn(1, 1, 64, 64, requires_grad=True)
    model(x)[0, 0, 32, 32].backward()
    assert (x.grad[0, 0].abs() > 0).sum() > 32 * 32
