"""Activations computed twice: the same gradients, the same statistics, less kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.step.activation_checkpointing import checkpoint_activations, iterate_checkpointable_blocks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU()) for _ in range(2)]
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_steps_are_bitwise_the_same(precision: str) -> None:
    plain = model()
    twice = copy.deepcopy(plain)
    assert checkpoint_activations(twice) == 2
    for one in (plain, twice):
        torch.manual_seed(7)
        stepper = Stepper(one, torch.optim.SGD(one.parameters(), lr=0.1), precision=precision)
        for _ in range(3):
            assert stepper.step(loss, torch.randn(16, 8)).applied
    for (name, ours), theirs in zip(plain.state_dict().items(), twice.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_skip_inside_checkpointing_restores_the_statistics() -> None:
    one = model()
    checkpoint_activations(one)
    stepper = Stepper(one, torch.optim.SGD(one.parameters(), lr=0.1), precision="fp32")
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    assert not stepper.step(lambda m, x: loss(m, x) * float("inf"), torch.randn(16, 8)).applied
    assert all(torch.equal(before[name], tensor) for name, tensor in one.state_dict().items())


def test_less_is_kept_for_backward() -> None:
    def kept(net: nn.Module) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            loss(net, torch.randn(64, 8))
        return sum(sizes)

    plain = model()
    twice = copy.deepcopy(plain)
    checkpoint_activations(twice)
    assert kept(twice) < kept(plain) / 2


def test_evaluation_is_untouched() -> None:
    one = model().eval()
    x = torch.randn(4, 8)
    before = one(x)
    checkpoint_activations(one)
    assert torch.equal(one(x), before)


def test_blocks_are_what_is_called_as_a_whole() -> None:
    net = Net()
    assert list(iterate_checkpointable_blocks(net)) == list(net.layers)
    assert list(iterate_checkpointable_blocks(nn.ModuleDict({"a": Block(), "b": nn.Linear(1, 1)}))) != []
    assert list(iterate_checkpointable_blocks(nn.Linear(1, 1))) == []


def test_a_model_within_a_model_is_not_one_block() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for level in self.levels:
                x = level(x)
            return x

    class Lists(nn.Module):
        """Its list holds single layers: it is a block itself."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    whole = nn.Sequential(Inner(), Lists())
    assert [type(block).__name__ for block in iterate_checkpointable_blocks(whole)] == ["Block", "Block", "Lists"]
