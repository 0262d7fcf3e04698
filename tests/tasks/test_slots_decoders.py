"""The slot decoders: blended pixels, tokens one after another, and drawn tokens that fp16 does not spoil."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfstep.errors import StateMismatch
from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.models.slots.layers import (
    Attention,
    BroadcastDecoder,
    DiscreteAutoencoder,
    FrameEncoder,
    PositionEmbedding,
    TokenDecoder,
    blend_slots,
    sample_gumbel_softmax,
)
from halfstep.train.weights import load_weights, write_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "layers", "grid"), [(16, 2, 8), (16, 1, 8), (64, 4, 8), (64, 2, 16), (15, 2, 15), (4, 3, 4)]
)
def test_slots_paint_frames_of_the_size_asked_for(size: int, layers: int, grid: int) -> None:
    decoder = BroadcastDecoder(5, 3, 4, layers, size)
    frames, shares = decoder(torch.randn(2, 6, 5))
    assert decoder.grid == grid
    assert frames.shape == (2, 3, size, size)
    assert shares.shape == (2, 6, size, size)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, size, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_most_opaque_slot_is_seen(dtype: torch.dtype) -> None:
    painted = torch.zeros(1, 2, 4, 1, 2, dtype=dtype)
    painted[0, 0, :3], painted[0, 1, :3] = 0.25, -0.5
    painted[0, 0, 3], painted[0, 1, 3] = torch.tensor([6e4, -6e4]), torch.tensor([-6e4, 6e4])
    with resolve_precision_name("fp16").autocast(CPU):
        frames, shares = blend_slots(painted)
    assert frames.dtype is shares.dtype is torch.float32
    assert frames[0, :, 0].tolist() == [[0.25, -0.5]] * 3
    assert shares[0, :, 0].tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_positions_differ_at_every_place_of_a_large_frame_in_16_bits() -> None:
    """In bf16 the coordinates of 512 places are fewer than 512 numbers."""
    assert len(torch.linspace(0, 1, 512).to(torch.bfloat16).unique()) < 512
    encoder = FrameEncoder(1, 2, 2, 1)
    with torch.no_grad():
        encoder.positions.project.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]]))
        encoder.positions.project.bias.zero_()
    with resolve_precision_name("bf16").autocast(CPU):
        seen = encoder.positions(torch.zeros(1, 2, 1, 512))
    assert len(seen[0, 1].unique()) == 512


def test_places_differ_where_features_are_in_16_bits_too() -> None:
    """What comes out is as narrow as what came in; of many channels, each is rounded at other places."""
    torch.manual_seed(0)
    encoder = FrameEncoder(1, 64, 2, 1)
    with torch.no_grad(), resolve_precision_name("bf16").autocast(CPU):
        seen = encoder.positions(torch.zeros(1, 64, 1, 1024, dtype=torch.bfloat16))
    assert seen.dtype is torch.bfloat16
    assert len(seen[0, :, 0].float().unique(dim=1)[0]) == 1024


def test_positions_are_distances_to_the_borders() -> None:
    positions = PositionEmbedding(4)
    with torch.no_grad():
        positions.project.weight.copy_(torch.eye(4))
        positions.project.bias.zero_()
    seen = positions(torch.zeros(1, 4, 3, 5))[0]
    assert seen[:, 0, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert seen[:, 2, 1].tolist() == [1.0, 0.0, 0.25, 0.75]


@pytest.mark.parametrize(("stride", "places"), [(1, 144), (2, 36), (4, 9)])
def test_the_encoder_makes_a_place_of_so_many_pixels(stride: int, places: int) -> None:
    assert FrameEncoder(3, 4, 6, stride)(torch.randn(2, 3, 12, 12)).shape == (2, places, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drawn_tokens_are_chances_in_every_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    likely = torch.randn(4, 512, 8, 8).to(dtype).requires_grad_()
    with resolve_precision_name("fp16").autocast(CPU):
        soft = sample_gumbel_softmax(likely, torch.tensor(0.1))
    assert soft.dtype is torch.float32
    assert torch.isfinite(soft).all()
    torch.testing.assert_close(soft.sum(1), torch.ones(4, 8, 8))
    soft.square().sum().backward()
    assert likely.grad is not None
    assert torch.isfinite(likely.grad).all()


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    torch.manual_seed(0)
    likely = torch.tensor([0.7, 0.2, 0.1]).log()[None, :, None].expand(1, 3, 40_000)
    counts = sample_gumbel_softmax(likely.to(torch.float16), torch.tensor(1.0)).argmax(1).flatten().bincount() / 40_000
    torch.testing.assert_close(counts, torch.tensor([0.7, 0.2, 0.1]), atol=0.01, rtol=0.0)


@pytest.mark.parametrize("stride", [2, 4, 8])
def test_frames_become_tokens_and_frames_again(stride: int) -> None:
    autoencoder = DiscreteAutoencoder(3, 11, 4, stride)
    frames, still = torch.randn(2, 3, 16, 16), torch.tensor(1.0)
    tokens, again = autoencoder(frames, still)
    assert again.shape == frames.shape
    assert tokens.shape == (2, 16 // stride, 16 // stride)
    assert tokens.dtype is torch.int64
    assert 0 <= tokens.min() <= tokens.max() < 11
    drawn_twice = [autoencoder(frames, still)[0] for _ in range(2)]
    assert not torch.equal(*drawn_twice)
    autoencoder.eval()
    (tokens, again), (tokens_again, again_again) = autoencoder(frames, still), autoencoder(frames, still)
    assert torch.equal(tokens, tokens_again)
    assert torch.equal(again, again_again)
    assert torch.equal(tokens, autoencoder.encoder(frames).argmax(1))


def test_a_token_depends_on_those_before_it_and_on_slots_alone() -> None:
    torch.manual_seed(0)
    decoder = TokenDecoder(5, 7, 6, width=8, layers=2, heads=2)
    slots, tokens = torch.randn(1, 3, 5), torch.tensor([[1, 2, 3, 4, 5, 6]])
    logits = decoder(slots, tokens)
    assert logits.shape == (1, 6, 7)
    changed = tokens.clone()
    changed[0, 3] = 0
    differs = (decoder(slots, changed) - logits).abs().amax(-1)[0] > 1e-7
    assert differs.tolist() == [False, False, False, False, True, True]
    assert ((decoder(slots + 1.0 * torch.randn(1, 3, 5), tokens) - logits).abs().amax(-1) > 1e-7).all()
    assert torch.allclose(decoder(slots.flip(1), tokens), logits, atol=1e-5)  # slots have no order


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_textbooks(causal: bool) -> None:
    torch.manual_seed(0)
    attention, x = Attention(8, 2, causal=causal), torch.randn(1, 5, 8)
    normed = attention.norm(x)
    q = attention.query(normed).view(5, 2, 4).transpose(0, 1)
    k, v = (part.reshape(5, 2, 4).transpose(0, 1) for part in attention.key_value(normed)[0].chunk(2, -1))
    logits = q @ k.transpose(1, 2) / 2.0
    if causal:
        logits = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    found = (logits.softmax(-1) @ v).transpose(0, 1).reshape(1, 5, 8)
    torch.testing.assert_close(attention(x), x + attention.out(found))


@torch.no_grad()
def test_an_untrained_slot_decodes_to_no_grid() -> None:
    torch.manual_seed(0)
    convolutions = BroadcastDecoder(5, 3, 8, 2, 32).convolutions
    inside = convolutions(torch.randn(1, 5, 1, 1).expand(1, 5, 8, 8))[..., 12:20, 12:20]
    torch.testing.assert_close(inside, inside[..., :1, :1].expand_as(inside))
    assert convolutions[0].weight.std().item() == pytest.approx((2 / (5 * 4)) ** 0.5, rel=0.2)


@torch.no_grad()
def test_the_signal_keeps_its_variance_after_four_layers() -> None:
    torch.manual_seed(0)
    frames = torch.randn(2, 3, 32, 32)
    seen = FrameEncoder(3, 64, 64, 1).convolutions(frames)[..., 8:-8, 8:-8]
    assert seen.square().mean().item() == pytest.approx(frames.square().mean().item(), rel=0.5)
    decoded = BroadcastDecoder(64, 3, 64, 4, 32).convolutions(torch.randn(2, 64, 8, 8))[..., 8:-8, 8:-8]
    assert 0.5 < decoded.square().mean().item() < 4.0  # the last layer has no ReLU behind it


@pytest.mark.wording
def test_weights_with_the_names_of_an_earlier_version_are_refused_by_name(tmp_path: Path) -> None:
    attention, file = Attention(8, 2), tmp_path / "old.safetensors"
    renamed = {"query": "ask", "key_value": "answer"}
    old = {}
    for name, tensor in attention.state_dict().items():
        layer, _, kind = name.partition(".")
        old[f"{renamed.get(layer, layer)}.{kind}"] = tensor
    write_tensors(old, {}, file)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    with pytest.raises(StateMismatch) as refused:
        load_weights(attention, file)
    assert "not in the model: ask.weight" in str(refused.value)
    assert "not in the file: query.weight" in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in attention.state_dict().items())
