"""Confusion counts, the figures derived from them, and the overlap loss and metric of segmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.precision.island import island
from halfstep.train.metrics import Metric

# Count pairs on the device. Metrics are updated between steps and must not synchronize; `torch.bincount` and boolean
# indexing do, because the host needs the size of their result.


FEW = 16
"""Up to this many cells, one comparison and sum per cell is faster than many additions to few addresses."""


def count_confusion(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return, per sample, how many elements are `row` in one tensor and `column` in the other: samples × rows ×
    columns.

    Counts are exact integers. Every number must be below its side of `shape`.
    """
    samples, cells = len(rows), shape[0] * shape[1]
    cell = rows.reshape(samples, -1).long() * shape[1] + columns.reshape(samples, -1).long()
    if cells <= FEW:
        return torch.stack([(cell == number).sum(1) for number in range(cells)], 1).view(samples, *shape)
    cell += torch.arange(samples, device=cell.device).unsqueeze(1) * cells
    one = torch.ones((), dtype=torch.int64, device=cell.device)
    tables = torch.zeros(samples * cells, dtype=torch.int64, device=cell.device)
    # Integer sums do not depend on the order, so the atomic additions on a GPU are deterministic.
    return tables.index_add_(0, cell.flatten(), one.expand(cell.numel())).view(samples, *shape)


@dataclass(frozen=True)
class ClassScores:
    """The figures of one class; a ratio that is undefined is None."""

    json_keys: ClassVar = ("class=name", "truth", "answered", "iou", "dice", "precision", "recall")

    name: str
    truth: int
    """Images or pixels of the class."""
    answered: int
    """Images or pixels that were taken for it."""
    iou: float | None
    dice: float | None
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class Confusion:
    """Counts of images or pixels by true and predicted class."""

    names: list[str]
    counts: Tensor
    """True × predicted class, int64."""

    def as_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {"names": self.names, "counts": self.counts.tolist()}

    def per_class(self) -> list[ClassScores]:
        """Return IoU, Dice, precision, recall and counts of each class."""
        counts = self.counts.double()
        both, truth, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        ratios = both / (truth + predicted - both), 2 * both / (truth + predicted), both / predicted, both / truth
        figures = [
            [None if value != value else value for value in values] for values in torch.stack(ratios, 1).tolist()
        ]
        counted = zip(self.names, truth.tolist(), predicted.tolist(), figures, strict=True)
        return [ClassScores(name, int(own), int(said), *values) for name, own, said, values in counted]

    def shares(self) -> list[list[float]]:
        """Return, per true class, the share predicted as each class; NaN in the row of an absent class."""
        rows = self.counts.double()
        shares: list[list[float]] = (rows / rows.sum(1, keepdim=True)).tolist()
        return shares

    def mistakes(self, most: int) -> list[tuple[str, str, int, float]]:
        """Return the most frequent confusions: truth, prediction, count, and the share of the true class."""
        wrong = self.counts.clone().fill_diagonal_(0)
        found, places = wrong.flatten().topk(min(most, wrong.numel()))
        total = self.counts.sum(1).tolist()
        pairs = [divmod(place, len(self.names)) for place in places.tolist()]
        return [
            (self.names[truth], self.names[predicted], count, count / total[truth])
            for count, (truth, predicted) in zip(found.tolist(), pairs, strict=True)
            if count
        ]


def compute_overlaps(tables: Tensor) -> dict[str, Tensor]:
    """Return the IoU, the Dice score and the pixel accuracy of each sample, from samples × truth × prediction.

    As in the `Overlap` metric: the foreground's with two classes, otherwise the mean over the classes present.
    """
    # MPS has no float64.
    counts = tables.to(torch.float64 if tables.is_cpu else torch.float32)
    both, truth, predicted = counts.diagonal(dim1=1, dim2=2), counts.sum(2), counts.sum(1)
    either = truth + predicted - both
    there = either > 0
    iou = torch.where(there, both / either.clamp(min=1), 1.0)
    dice = torch.where(there, 2 * both / (truth + predicted).clamp(min=1), 1.0)
    right = both.sum(1) / counts.sum((1, 2)).clamp(min=1)
    if tables.shape[1] == 2:
        return {"iou": iou[:, 1], "dice": dice[:, 1], "accuracy": right}
    many = there.sum(1).clamp(min=1)
    means = {name: torch.where(there, value, 0.0).sum(1) / many for name, value in (("iou", iou), ("dice", dice))}
    return {**means, "accuracy": right}


@island
def compute_overlap_loss(logits: Tensor, target: Tensor, ignored: int, dice: float) -> Tensor:
    """Return cross-entropy mixed with a share `dice` of the Dice loss; `ignored` pixels count in neither.

    One logit per pixel means two classes. Where every pixel is ignored, the loss and its gradients are 0.
    """
    target = target.long()
    # The sums below are masked with torch.where, not indexed: the number of valid pixels stays on the device.
    valid = target != ignored
    classes = logits.shape[1]
    # An index outside the classes is an error on the host and a device-side assert on CUDA; mask the result instead.
    target = torch.where(valid, target, 0)
    if classes == 1:
        there = target.unsqueeze(1) == 1
        error = F.binary_cross_entropy_with_logits(logits, there.to(logits.dtype), reduction="none").squeeze(1)
        chances = logits.sigmoid()
    else:
        there = target.unsqueeze(1) == torch.arange(classes, device=target.device).view(1, -1, 1, 1)
        error = F.cross_entropy(logits, target, reduction="none")
        chances = logits.softmax(1)
    entropy = torch.where(valid, error, 0.0).sum() / valid.sum().clamp(min=1)
    keep = valid.unsqueeze(1)
    return (1.0 - dice) * entropy + dice * _compute_dice_loss(torch.where(keep, chances, 0.0), there & keep)


def _compute_dice_loss(chances: Tensor, there: Tensor) -> Tensor:
    """Return 1 - Dice over the batch, averaged over the classes present in it.

    Absent classes are left to the cross-entropy: their Dice score would be 0 for any prediction.
    """
    pixels = (0, 2, 3)
    truth = there.sum(pixels)
    both = torch.where(there, chances, 0.0).sum(pixels)
    # A class that is present has at least one pixel, so the clamp never changes a denominator that counts.
    score = 2.0 * both / (chances.sum(pixels) + truth).clamp(min=1.0)
    return torch.where(truth > 0, 1.0 - score, 0.0).sum() / (truth > 0).sum().clamp(min=1)


class Overlap(Metric):
    """IoU and Dice from int64 counts.

    `iou` and `dice` are means over the classes that occur in truth or prediction; each such class also has its own
    value. With two classes they are those of the foreground. If every pixel is ignored, both are NaN.
    """

    confmat: Tensor
    """Pixels by true and predicted class."""

    def __init__(self, names: list[str], ignored: int) -> None:
        super().__init__(confmat=torch.zeros(len(names), len(names), dtype=torch.int64))
        self.names, self.ignored = names, ignored

    def update(self, predicted: Tensor, truth: Tensor) -> None:
        """Add class indices, in any shape."""
        classes = len(self.names)
        # Ignored pixels are counted in an extra row that is dropped: boolean indexing would synchronize the device.
        rows = torch.where(truth == self.ignored, classes, truth)
        counts = count_confusion(rows.unsqueeze(0), predicted.unsqueeze(0), (classes + 1, classes))[0, :classes]
        self.confmat = self.confmat + counts

    def compute(self) -> dict[str, Tensor]:
        """Return IoU and Dice, over all ranks."""
        counts = self.total("confmat")
        if not counts.sum():
            return {name: counts.new_tensor(float("nan")) for name in ("iou", "dice")}
        both, truth, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        return _compute_class_scores(self.names, both, truth, predicted)


def _compute_class_scores(names: list[str], both: Tensor, truth: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    either = truth + predicted - both
    # A class that is neither present nor predicted agrees perfectly.
    iou = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    dice = torch.where(either > 0, 2 * both / (truth + predicted).clamp(min=1), 1.0)
    if len(names) == 2:
        return {"iou": iou[1], "dice": dice[1]}
    there = (either > 0).nonzero().flatten().tolist()
    scores = {"iou": iou[there].mean(), "dice": dice[there].mean()}
    for kind, each in (("iou", iou), ("dice", dice)):
        scores |= {f"{kind}_{names[number]}": each[number] for number in there}
    return scores
