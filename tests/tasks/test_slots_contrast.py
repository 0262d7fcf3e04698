"""Temporal contrast: low where slots keep to their things, wide, and finite where a slot is nothing."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.models.slots.model import compute_temporal_contrast

CPU = torch.device("cpu")


def test_slots_that_keep_to_their_things_are_better_than_slots_that_swap() -> None:
    torch.manual_seed(0)
    kept = torch.randn(2, 1, 4, 16).expand(2, 3, 4, 16)
    swapped = kept.clone()
    swapped[:, 1] = kept[:, 1].flip(1)
    assert compute_temporal_contrast(kept, 0.1) < 0.1 < compute_temporal_contrast(swapped, 0.1)


def test_it_is_the_cross_entropy_of_cosines_over_the_whole_batch() -> None:
    torch.manual_seed(0)
    slots = torch.randn(2, 3, 2, 5)
    each = []
    for frame in range(2):
        now, then = slots[:, frame].reshape(4, 5).double(), slots[:, frame + 1].reshape(4, 5).double()
        cosines = torch.cosine_similarity(now[:, None], then[None], dim=-1) / 0.5
        each += [-cosines[n].log_softmax(0)[n] for n in range(4)]
    torch.testing.assert_close(compute_temporal_contrast(slots, 0.5).double(), torch.stack(each).mean())


def test_slots_that_are_all_alike_cost_the_logarithm_of_their_number() -> None:
    assert compute_temporal_contrast(torch.ones(3, 4, 5, 8), 0.1).item() == pytest.approx(math.log(15), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1.0, 6e4])
def test_it_is_wide_and_finite_at_any_length(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    slots = (scale * torch.randn(2, 3, 4, 16).clamp(-1, 1)).to(dtype).requires_grad_()
    with resolve_precision_name("fp16").autocast(CPU):
        loss = compute_temporal_contrast(slots, 0.1)
    loss.backward()
    assert loss.dtype is torch.float32
    assert torch.isfinite(loss)
    assert slots.grad is not None
    assert torch.isfinite(slots.grad).all()


def test_one_frame_has_no_next() -> None:
    assert compute_temporal_contrast(torch.randn(2, 1, 4, 8), 0.1).item() == 0.0
