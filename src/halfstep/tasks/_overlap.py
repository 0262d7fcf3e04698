"""How far two maps of classes overlap: as a loss to train with, and as a metric to judge by."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from halfstep.precision.island import island
from halfstep.tasks._counts import counted


@island
def overlap_loss(logits: Tensor, target: Tensor, ignored: int, dice: float) -> Tensor:
    """Cross-entropy, with a share of `dice` of the Dice loss; pixels that are `ignored` count in neither.

    One logit a pixel means two classes. With nothing to learn from, the loss is 0 and so are its gradients.
    """
    target = target.long()
    valid = target != ignored
    classes = logits.shape[1]
    # An ignored pixel must still be a class that exists, or it cannot be looked up.
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
    return (1.0 - dice) * entropy + dice * _dice(torch.where(keep, chances, 0.0), there & keep)


def _dice(chances: Tensor, there: Tensor) -> Tensor:
    """1 - Dice over the whole batch, averaged over the classes that are in it; the others are cross-entropy's."""
    pixels = (0, 2, 3)
    truth = there.sum(pixels)
    both = torch.where(there, chances, 0.0).sum(pixels)
    # A class that is there has at least one pixel, so the sum below is at least 1 wherever it counts.
    score = 2.0 * both / (chances.sum(pixels) + truth).clamp(min=1.0)
    return torch.where(truth > 0, 1.0 - score, 0.0).sum() / (truth > 0).sum().clamp(min=1)


class Overlap(Metric):
    """IoU and Dice, from counts in 64-bit integers.

    `iou` and `dice` are means over the classes that are there, in the truth or in the prediction; beside them stands
    one of each for every such class. With two classes they are those of the foreground alone. Where every pixel is
    ignored there is nothing to judge, and both are NaN.
    """

    full_state_update = False
    confmat: Tensor
    """Pixels of each class in truth, by the class that they were predicted to be."""

    def __init__(self, names: list[str], ignored: int) -> None:
        super().__init__()
        self.names, self.ignored = names, ignored
        self.add_state("confmat", torch.zeros(len(names), len(names), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, said: Tensor, truth: Tensor) -> None:
        """Numbers of classes, in any shape."""
        classes = len(self.names)
        # What is ignored is counted in a row of its own, which is left out: to choose pixels, one has to wait for them.
        rows = torch.where(truth == self.ignored, classes, truth)
        self.confmat += counted(rows.unsqueeze(0), said.unsqueeze(0), (classes + 1, classes))[0, :classes]

    def compute(self) -> Any:
        counts = self.confmat.cpu().to(torch.float64)  # in the main memory: not every device has float64
        if not counts.sum():
            return {name: counts.new_tensor(float("nan")) for name in ("iou", "dice")}
        both, truth, said = counts.diagonal(), counts.sum(1), counts.sum(0)
        return _scores(self.names, both, truth, said)


def _scores(names: list[str], both: Tensor, truth: Tensor, said: Tensor) -> dict[str, Tensor]:
    either = truth + said - both
    # Where a class is neither there nor predicted, the two agree completely.
    iou = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    dice = torch.where(either > 0, 2 * both / (truth + said).clamp(min=1), 1.0)
    if len(names) == 2:
        return {"iou": iou[1], "dice": dice[1]}
    there = (either > 0).nonzero().flatten().tolist()
    scores = {"iou": iou[there].mean(), "dice": dice[there].mean()}
    for kind, each in (("iou", iou), ("dice", dice)):
        scores |= {f"{kind}_{names[number]}": each[number] for number in there}
    return scores
