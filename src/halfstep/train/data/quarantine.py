"""Which samples of a batch hold a number that is not finite. Asked only after a step was skipped."""

from __future__ import annotations

import torch

from halfstep.train.data.source import Batch


def nonfinite_ids(batch: Batch) -> list[int]:
    """Their numbers, in the batch's order; none where the numbers came in finite and the step made them otherwise."""
    bad = torch.zeros(len(batch.ids), dtype=torch.bool)
    for tensor in batch.tensors.values():
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(batch.ids):
            finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
            bad |= ~finite.to(bad.device)
    return [number for number, is_bad in zip(batch.ids, bad.tolist(), strict=True) if is_bad]
