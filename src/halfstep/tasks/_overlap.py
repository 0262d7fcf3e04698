"""How far two maps of classes overlap, as a metric to judge by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from halfstep.errors import BadData


class Overlap(MulticlassConfusionMatrix):
    """IoU and Dice, from counts in 64-bit integers.

    `iou` and `dice` are means over the classes that are there, in the truth or in the prediction; beside them stands
    one of each for every such class. With two classes they are those of the foreground alone.
    """

    def __init__(self, names: list[str], ignored: int) -> None:
        super().__init__(num_classes=len(names), ignore_index=ignored, validate_args=False)
        self.names = names

    def compute(self) -> Any:
        counts = self.confmat.to(torch.float64)
        if not counts.sum():
            raise BadData(
                "no pixel of the validation masks belongs to a class",
                allowed="masks with at least one pixel that is not data.ignore_index",
                do="check data.ignore_index and the masks of the validation samples",
            )
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
