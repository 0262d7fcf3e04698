"""Cross-entropy, Dice and IoU against sums by hand in float64, and where sums go wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from halfstep.tasks.shared.confusion import Overlap, compute_overlap_loss

IGNORED = 255


def by_hand(logits: Tensor, target: Tensor, dice: float) -> float:
    """Pixel by pixel, in float64, with nothing shared with the code under test but the definition."""
    logits = logits.double()
    if logits.shape[1] == 1:
        chances = torch.cat([1 - logits.sigmoid(), logits.sigmoid()], 1)
        judged = [1]
    else:
        chances, judged = logits.softmax(1), list(range(logits.shape[1]))
    pixels = [
        (chances[n, :, y, x], int(target[n, y, x]))
        for n in range(target.shape[0])
        for y in range(target.shape[1])
        for x in range(target.shape[2])
        if target[n, y, x] != IGNORED
    ]
    entropy = sum(-math.log(float(p[t])) for p, t in pixels) / len(pixels)
    present = [c for c in judged if any(t == c for _, t in pixels)]
    scores = []
    for c in present:
        both = sum(float(p[c]) for p, t in pixels if t == c)
        scores.append(2 * both / (sum(float(p[c]) for p, _ in pixels) + sum(t == c for _, t in pixels)))
    missed = sum(1 - s for s in scores) / len(scores) if scores else 0.0
    return (1 - dice) * entropy + dice * missed


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("dice", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("share_ignored", [0.0, 0.4])
def test_loss_is_what_the_definition_says(outputs: int, dice: float, share_ignored: float) -> None:
    logits = 3 * torch.randn(2, outputs, 5, 7)
    target = torch.randint(0, max(outputs, 2) - (outputs > 1), (2, 5, 7))  # the last of four classes is absent
    target[torch.rand(target.shape) < share_ignored] = IGNORED
    loss = compute_overlap_loss(logits, target.to(torch.uint8), IGNORED, dice)
    assert loss.item() == pytest.approx(by_hand(logits, target, dice), rel=1e-5)


@pytest.mark.parametrize("outputs", [1, 3])
def test_what_is_ignored_changes_nothing(outputs: int) -> None:
    logits, target = torch.randn(1, outputs, 4, 4), torch.randint(0, 2, (1, 4, 4))
    target[0, 0, 0] = IGNORED
    other = logits.clone()
    other[0, :, 0, 0] = 1e6
    other.requires_grad_()
    loss = compute_overlap_loss(other, target, IGNORED, 0.5)
    assert loss.item() == compute_overlap_loss(logits, target, IGNORED, 0.5).item()
    loss.backward()
    assert (other.grad[0, :, 0, 0] == 0).all()


@pytest.mark.parametrize("outputs", [1, 3])
def test_nothing_to_learn_from_is_a_loss_of_zero_with_a_gradient(outputs: int) -> None:
    logits = torch.randn(2, outputs, 4, 4, requires_grad=True)
    loss = compute_overlap_loss(logits, torch.full((2, 4, 4), IGNORED, dtype=torch.uint8), IGNORED, 0.5)
    assert loss.item() == 0.0
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_logits_in_16_bits(dtype: torch.dtype, outputs: int, sign: float) -> None:
    logits = torch.full((4, outputs, 96, 96), 0.0)
    logits[:, -1] = sign * 1e4
    logits = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = compute_overlap_loss(logits, torch.ones(4, 96, 96, dtype=torch.uint8), IGNORED, 0.5)
    assert loss.dtype is torch.float32
    assert torch.isfinite(loss)
    loss.backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("outputs", [1, 3])
def test_an_absent_foreground_is_finite_and_still_learnt_from(outputs: int) -> None:
    logits = torch.randn(1, outputs, 8, 8, requires_grad=True)
    loss = compute_overlap_loss(logits, torch.zeros(1, 8, 8, dtype=torch.uint8), IGNORED, 0.5)
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad.abs().sum() > 0


def counted(said: Tensor, truth: Tensor, number: int) -> tuple[float, float]:
    keep = truth != IGNORED
    a, b = (said == number) & keep, (truth == number) & keep
    both, either = int((a & b).sum()), int((a | b).sum())
    return both / either, 2 * both / (int(a.sum()) + int(b.sum()))


def test_iou_and_dice_are_counted_over_all_batches() -> None:
    names = ["ground", "road", "roof", "river"]
    metric = Overlap(names, IGNORED)
    batches = [(torch.randint(0, 3, (2, 9, 9)), torch.randint(0, 3, (2, 9, 9))) for _ in range(3)]
    for said, truth in batches:
        truth[torch.rand(truth.shape) < 0.2] = IGNORED
        metric.update(said, truth)
    said, truth = (torch.cat(parts) for parts in zip(*batches, strict=True))
    values = metric.compute()
    each = [counted(said, truth, n) for n in range(3)]
    for number in range(3):
        assert values[f"iou_{names[number]}"].item() == each[number][0]
        assert values[f"dice_{names[number]}"].item() == each[number][1]
    assert values["iou"].item() == pytest.approx(sum(iou for iou, _ in each) / 3, abs=1e-15)
    assert values["dice"].item() == pytest.approx(sum(dice for _, dice in each) / 3, abs=1e-15)
    assert not any(name.endswith("river") for name in values)  # neither there nor predicted


def test_a_class_that_is_only_predicted_counts_as_missed() -> None:
    metric = Overlap(["a", "b", "c"], IGNORED)
    metric.update(torch.tensor([0, 0, 2]), torch.tensor([0, 0, 0]))
    assert metric.compute()["iou_c"] == 0.0
    assert metric.compute()["iou"].item() == pytest.approx((2 / 3 + 0.0) / 2)


@pytest.mark.parametrize(
    ("said", "truth", "iou"),
    [([1, 1, 0, 0], [1, 0, 1, 0], 1 / 3), ([0, 0], [0, 0], 1.0), ([1, 0], [0, 0], 0.0), ([1, 1], [1, IGNORED], 1.0)],
)
def test_two_classes_are_judged_by_the_foreground(said: list[int], truth: list[int], iou: float) -> None:
    metric = Overlap(["0", "1"], IGNORED)
    metric.update(torch.tensor(said), torch.tensor(truth))
    assert metric.compute()["iou"].item() == pytest.approx(iou)
    assert set(metric.compute()) == {"iou", "dice"}


def test_counts_do_not_round_where_fp32_would() -> None:
    metric = Overlap(["0", "1"], IGNORED)
    metric.confmat += torch.tensor([[0, 1], [0, 2**40]])
    assert metric.compute()["iou"].item() == 2**40 / (2**40 + 1)
    assert metric.compute()["iou"].item() < 1.0


@pytest.mark.parametrize("names", [["0", "1"], ["0", "1", "2"]])
def test_masks_that_are_ignored_altogether_are_judged_by_nothing(names: list[str]) -> None:
    metric = Overlap(names, IGNORED)
    metric.update(torch.tensor([1, 0]), torch.tensor([IGNORED, IGNORED]))
    values = metric.compute()
    assert set(values) == {"iou", "dice"}
    assert all(math.isnan(value.item()) for value in values.values())


def test_counts_are_those_of_torchmetrics() -> None:
    metric = Overlap(["a", "b", "c"], IGNORED)
    theirs = MulticlassConfusionMatrix(num_classes=3, ignore_index=IGNORED)
    for _ in range(3):
        said, truth = torch.randint(0, 3, (2, 2, 9, 7)).unbind()
        truth[torch.rand(truth.shape) < 0.2] = IGNORED
        metric.update(said, truth)
        theirs.update(said, truth)
    assert torch.equal(metric.confmat, theirs.confmat)
    assert metric.confmat.dtype == torch.int64


class OnNarrowDevice(Tensor):
    """Like a tensor on a device that has no float64; `cpu` brings it home."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        assert torch.float64 not in args, "this device has no float64"
        return super().to(*args, **kwargs)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor)


def test_a_device_without_float64() -> None:
    metric = Overlap(["0", "1"], IGNORED)
    metric.update(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0]))
    metric.confmat = metric.confmat.as_subclass(OnNarrowDevice)
    assert metric.compute()["iou"].item() == 0.5
