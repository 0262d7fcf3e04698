"""Name metrics for users, in the usual spelling of the field, and know which of them are shares between 0 and 1."""

from __future__ import annotations

from halfstep.printable import escape_to_one_line

_SPELLINGS = {
    "iou": "IoU",
    "miou": "mIoU",
    "dice": "Dice",
    "psnr": "PSNR",
    "fg": "FG",
    "ari": "ARI",
    "mbo": "mBO",
    "ssim": "SSIM",
    "top1": "Top-1",
    "top5": "Top-5",
    "f1": "F1",
    "auc": "AUC",
    "auroc": "AUROC",
}
_SHARES = {"iou", "miou", "dice", "jaccard", "ari", "mbo", "ssim", "top1", "top5", "accuracy", "acc"}
_SHARES |= {"f1", "auc", "auroc", "recall", "sensitivity", "specificity"}
"""Words of metrics whose values are shares between 0 and 1, or become so with a model that learns."""


def format_metric_name(metric: str) -> str:
    """Return the usual spelling of a metric."""
    words = " ".join(_SPELLINGS.get(word.lower(), word) for word in escape_to_one_line(metric).split("_"))
    return words if words.startswith(tuple(_SPELLINGS.values())) else words[:1].upper() + words[1:]


def is_share(metric: str) -> bool:
    """Return whether the values of a metric, or of one of its classes, are shares between 0 and 1."""
    return not _SHARES.isdisjoint(metric.lower().split("_"))
