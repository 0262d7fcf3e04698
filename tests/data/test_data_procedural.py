"""Drawn sets: the same for a seed, exact, fast, learnable, and not by their mean color."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.data.image_io import scale_to_unit_range
from halfstep.data.synthetic.shapes import KINDS, ShapeLabels, ShapeMasks
from halfstep.errors import WrongUse


@pytest.mark.parametrize("kind", [ShapeMasks, ShapeLabels])
def test_a_sample_is_a_function_of_seed_and_index(kind: Any) -> None:
    first, again, other = kind(9, 32, 3, 3, seed=1), kind(99, 32, 3, 3, seed=1), kind(9, 32, 3, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.read(5).values(), again.read(5).values(), strict=True))
    assert not torch.equal(first.read(5)["image"], other.read(5)["image"])
    assert not torch.equal(first.read(5)["image"], first.read(6)["image"])
    assert len({first.name(n) for n in range(9)} | {other.name(n) for n in range(9)}) == 18


@pytest.mark.parametrize(("size", "classes", "channels"), [(8, 2, 1), (33, 4, 3), (64, 11, 5)])
def test_masks_have_every_class(size: int, classes: int, channels: int) -> None:
    source = ShapeMasks(300, size, classes, channels)
    samples = [source.read(n) for n in range(0, 300, 3)]
    assert all(s["image"].shape == (channels, size, size) and s["image"].dtype == torch.uint8 for s in samples)
    assert all(s["mask"].shape == (size, size) and s["mask"].dtype == torch.uint8 for s in samples)
    assert set(torch.cat([s["mask"].flatten() for s in samples]).tolist()) == set(range(classes))
    assert len(source.classes) == classes
    foreground = sum(float((s["mask"] > 0).float().mean()) for s in samples) / len(samples)
    assert 0.1 < foreground < 0.6


def test_labels_are_balanced_and_named() -> None:
    source = ShapeLabels(40, 32, 10)
    assert torch.bincount(torch.stack([source.read(n)["label"] for n in range(40)])).tolist() == [4] * 10
    assert sorted(source.classes) == sorted(KINDS)


@pytest.mark.wording
@pytest.mark.parametrize("wrong", [{"samples": 0}, {"size": 4}, {"classes": 1}, {"classes": 12}, {"channels": 0}])
@pytest.mark.parametrize("kind", [ShapeMasks, ShapeLabels])
def test_impossible_sets_are_refused(kind: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(WrongUse, match="drawn samples"):
        kind(**{"samples": 5, **wrong})


def test_drawing_is_fast() -> None:
    source = ShapeMasks(100, 64)
    source.read(0)
    begin = time.process_time()
    for n in range(50):
        source.read(n)
    assert (time.process_time() - begin) / 50 < 0.01


def batch(source: Any, begin: int, end: int) -> tuple[Tensor, Tensor]:
    samples = [source.read(n) for n in range(begin, end)]
    target = "mask" if "mask" in samples[0] else "label"
    return scale_to_unit_range(torch.stack([s["image"] for s in samples])) - 0.5, torch.stack(
        [s[target] for s in samples]
    ).long()


def conv(a: int, b: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()]


def fitted(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        at = torch.arange(step * 32, step * 32 + 32) % len(x)
        loss = F.cross_entropy(model(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


def test_labels_are_learned_by_a_small_network_and_not_by_mean_colour() -> None:
    source = ShapeLabels(640, 32, 4)
    (x, y), (x2, y2) = batch(source, 0, 512), batch(source, 512, 640)
    network = nn.Sequential(
        *conv(3, 16, 2), *conv(16, 32, 2), *conv(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)
    )
    assert accuracy(fitted(network, x, y, 100), x2, y2) > 0.8
    color = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 4))
    assert accuracy(fitted(color, x, y, 100), x2, y2) < 0.5


def test_masks_are_learned_by_a_small_network_and_not_by_colour() -> None:
    source = ShapeMasks(192, 32, 2)
    (x, y), (x2, y2) = batch(source, 0, 128), batch(source, 128, 192)

    def iou(model: nn.Module) -> float:
        with torch.no_grad():
            said = model(x2).argmax(1) == 1
        return float((said & (y2 == 1)).sum() / (said | (y2 == 1)).sum())

    network = nn.Sequential(
        *conv(3, 8), *conv(8, 16, 2), *conv(16, 16), *conv(16, 16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 2, 1)
    )
    pixelwise = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 2, 1))
    learned, by_color = iou(fitted(network, x, y, 100)), iou(fitted(pixelwise, x, y, 100))
    assert learned > 0.6
    assert learned > by_color + 0.1
