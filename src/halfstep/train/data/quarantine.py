"""Which samples of a batch hold a number that is not finite. Asked only after a step was skipped."""

from __future__ import annotations

import torch

from halfstep.train.data.source import Batch, Sample


def is_finite(sample: Sample) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in sample.values() if _has_fractions(tensor))


def _has_fractions(value: object) -> bool:
    """A transform may leave a plain number in a sample, which becomes a tensor with the batch."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def nonfinite_ids(batch: Batch) -> list[int]:
    """Their numbers, in the batch's order; none where the numbers came in finite and the step made them otherwise.

    What was noted before the samples were mixed counts; the batch itself is looked at where nothing was.
    """
    if batch.nonfinite:
        return list(batch.nonfinite)
    bad = torch.zeros(len(batch.ids), dtype=torch.bool)
    for tensor in batch.tensors.values():
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(batch.ids):
            finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
            bad |= ~finite.to(bad.device)
    return [number for number, is_bad in zip(batch.ids, bad.tolist(), strict=True) if is_bad]
