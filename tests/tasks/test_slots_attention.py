"""Slot attention: shares and weights add up to one in every precision, for any logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.models.slots.model import (
    FirstSlots,
    Gate,
    SlotAttention,
    compute_place_weights,
    compute_slot_shares,
)

CPU = torch.device("cpu")
LARGEST = 65504.0
"""Of fp16."""
CASES: dict[str, Tensor] = {
    "usual": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)),
    "huge": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).sign() * LARGEST,
    "overflown": torch.tensor([[[math.inf, 1.0], [-math.inf, 2.0]], [[math.inf, math.inf], [math.inf, -math.inf]]]),
    "tiny": torch.full((2, 5, 64), 6e-8),
    "all slots equal": torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2)).expand(2, 5, 64),
    "one slot loses everywhere": torch.tensor([LARGEST, -LARGEST])[None, :, None].expand(2, 2, 64),
    "one place": torch.randn(2, 5, 1, generator=torch.Generator().manual_seed(3)),
    "one slot": torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(4)),
    "many places": torch.zeros(1, 3, 128 * 128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_shares_and_weights_add_up_and_have_gradients(case: str, dtype: torch.dtype) -> None:
    logits = CASES[case].to(dtype, copy=True).requires_grad_()
    with resolve_precision_name("fp16").autocast(CPU):
        shares, weights = compute_slot_shares(logits), compute_place_weights(logits)
    assert shares.dtype is weights.dtype is torch.float32
    assert_ones(shares.sum(-2))
    assert_ones(weights.sum(-1))
    (shares.square().sum() + weights.square().sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_weighted_mean_is_the_textbooks() -> None:
    logits = CASES["usual"]
    shares = logits.double().softmax(1)
    torch.testing.assert_close(compute_place_weights(logits).double(), shares / shares.sum(-1, keepdim=True))


def test_a_slot_that_won_nothing_has_a_mean_where_an_epsilon_of_habit_has_none() -> None:
    logits = CASES["one slot loses everywhere"].to(torch.float16)
    shares = logits.softmax(1) + 1e-8  # rounded away in fp16, and what is left is divided by zero
    assert torch.isnan(shares / shares.sum(-1, keepdim=True)).any()
    assert_ones(compute_place_weights(logits).sum(-1))


def test_what_is_not_a_number_stays_so() -> None:
    logits = CASES["usual"].clone()
    logits[0, 0, 0] = math.nan
    assert torch.isnan(compute_place_weights(logits)).any()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_mean_over_many_places_keeps_its_size_in_16_bits(precision: str) -> None:
    values = 3.0 + torch.rand(1, 128 * 128, 4)
    with resolve_precision_name(precision).autocast(CPU):
        mean = compute_place_weights(CASES["many places"]) @ values
    torch.testing.assert_close(mean.float(), values.mean(1, keepdim=True).expand(1, 3, 4), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rounds_in_16_bits_are_finite_at_any_scale(precision: str, scale: float) -> None:
    torch.manual_seed(0)
    attention = SlotAttention(16)
    keys, values = (scale * torch.randn(2, 49, 16)).requires_grad_(), torch.randn(2, 49, 16)
    slots = torch.randn(2, 4, 16)
    with resolve_precision_name(precision).autocast(CPU):
        found, shares = attention(keys, values, slots, 3)
    assert found.dtype is shares.dtype is torch.float32
    assert torch.isfinite(found).all()
    assert_ones(shares.sum(1))
    found.square().mean().backward()
    assert keys.grad is not None
    assert torch.isfinite(keys.grad).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in attention.parameters())


def test_slots_part_for_things_that_differ() -> None:
    """Places of two kinds: after some training, each of two slots owns one kind."""
    torch.manual_seed(0)
    attention, kinds = SlotAttention(8), torch.tensor([0, 1]).repeat(16)
    places = torch.eye(8)[kinds][None].expand(4, -1, -1)
    optimizer = torch.optim.Adam(attention.parameters(), 1e-2)
    for _ in range(150):
        slots, shares = attention(places, places, torch.randn(4, 2, 8), 3)
        told = shares.transpose(1, 2) @ slots
        loss = (told - places).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    owner = shares.argmax(1)
    assert (owner[:, kinds == 0] == owner[:, :1]).all()
    assert (owner[:, kinds == 1] == 1 - owner[:, :1]).all()


def test_the_gate_is_torchs() -> None:
    gate, cell = Gate(6), torch.nn.GRUCell(6, 6)
    gate.new.load_state_dict({"weight": cell.weight_ih, "bias": cell.bias_ih})
    gate.old.load_state_dict({"weight": cell.weight_hh, "bias": cell.bias_hh})
    update, slots = torch.randn(5, 6), torch.randn(5, 6)
    torch.testing.assert_close(gate(update, slots), cell(update, slots))


def test_first_slots_differ_and_are_the_same_for_every_clip() -> None:
    """Alike, they would never part."""
    first = FirstSlots(3, 8)
    before = torch.get_rng_state()
    found = first(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert len({tuple(slot) for slot in found[0].tolist()}) == 3
    found.sum().backward()
    assert first.slots.grad is not None


def assert_ones(sums: Tensor) -> None:
    torch.testing.assert_close(sums, torch.ones_like(sums))
