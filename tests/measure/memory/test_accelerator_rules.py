"""Ledgers of a GPU that is not here: CUDA's formats, CUDA's attention, a backward without the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import PrecisionRefused
from halfstep.measure.case import Case, build_case
from halfstep.measure.memory.devices import device_named
from halfstep.measure.memory.estimate import estimate_cuda_ledger, estimate_device_ledger, estimate_ledger
from halfstep.measure.memory.fake_tensors import replace_torch_backward
from halfstep.measure.setting import StepSetting
from halfstep.precision.island import island
from tests.support import cases

A100 = device_named("a100-80gb")
BF16 = StepSetting(precision="bf16")


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().sum()


class Block(nn.Module):
    """Shares a weight, adds to itself, and broadcasts: what an engine has to sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.norm(x))
        x = x * self.scale + F.linear(x, self.inner.weight)
        return x.relu_() + x.mean()


class Twice(torch.autograd.Function):
    """A person's own operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Twice.apply(self.inner(x))
        return out


class OneForTwo(nn.Module):
    """A sum hands the same memory to both of its terms: neither may keep it, nor add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4, 16))
        self.first, self.second = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left.exp(), self.right.exp()
        again = 3 * left
        return (left + right) * x + again + (self.first + self.second)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (Block, (4, 16)),
    "one for two": (OneForTwo, (4, 16)),
    "own operation": (Own, (4, 16)),
    "checkpointed": (Checkpointed, (4, 16)),
    "convolutions": (lambda: cases.convolutions()[0], (4, 3, 16, 16)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_walk_gives_the_gradients_of_the_engine(name: str, autocast: bool) -> None:
    """On real tensors, bit for bit, and twice, so that gradients are also added up."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    ours = make()
    engine, batches = copy.deepcopy(ours), [torch.randn(shape) for _ in range(2)]

    def backward(model: nn.Module) -> None:
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(batch).float().square().sum()
            loss.backward()

    backward(engine)
    with replace_torch_backward():
        backward(ours)
    for (path, mine), theirs in zip(ours.named_parameters(), engine.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad), path
        assert mine.grad.stride() == theirs.grad.stride(), path


def test_torch_is_itself_again_after_a_walk_that_failed() -> None:
    before = (Tensor.backward, torch._C._current_autograd_node, F.scaled_dot_product_attention)
    with pytest.raises(ZeroDivisionError), replace_torch_backward():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        estimate_cuda_ledger(
            lambda: build_case(nn.Linear(2, 2), lambda model, batch: 1 / 0, torch.ones(1, 2)), StepSetting()
        )
    assert before == (Tensor.backward, torch._C._current_autograd_node, F.scaled_dot_product_attention)
    assert not torch.is_autocast_enabled("cuda")
    with pytest.warns(UserWarning, match="CUDA is not available") if not torch.cuda.is_available() else _quiet():
        torch.autocast("cuda")


def _quiet() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_in_fp32_a_gpu_s_plain_model_has_the_cpu_s_parts(recompute: bool, microbatches: int) -> None:
    """Nothing is decided by autocast there, so that what is kept must be the same, byte for byte."""
    setting = StepSetting(recompute=recompute, microbatches=microbatches)

    def make() -> Case:
        return build_case(*cases.linear())

    cuda, cpu = estimate_device_ledger(make, setting, A100), estimate_ledger(make, setting)
    for part in ("weights", "optimizer", "batch", "gradients", "activations", "cast copies"):
        assert cuda.whole[part] == cpu.whole[part], part
    assert cuda.device == "a100-80gb"
    assert not cuda.verified
    assert "not verified on this device" in cuda.notes[-1]


def norm_and_softmax() -> Case:
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Softmax(-1), nn.Linear(256, 8))
    return build_case(model, summed, torch.randn(32, 64))


def test_cuda_keeps_softmax_and_norms_in_fp32_where_a_cpu_does_not() -> None:
    kept = estimate_device_ledger(norm_and_softmax, BF16, A100)
    wide = 32 * 256 * 4
    # The norm's input in fp32, the softmax's output in fp32, and the statistics of 32 rows twice.
    assert kept.by_format["fp32"] >= 2 * wide + 2 * 32 * 4
    assert kept.by_format["fp32"] < 3 * wide
    assert kept.whole["activations"] > estimate_ledger(norm_and_softmax, BF16).whole["activations"]
    assert kept.peak == sum(kept.at_peak.values())


def test_an_island_stays_in_fp32_under_cuda_s_rules() -> None:
    def make(apart: bool) -> Case:
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
        if apart:
            island(model, "1")
        return build_case(model, summed, torch.randn(32, 64))

    # tanh keeps its result; in the island that is the fp32 one, before it is cast back.
    inside, outside = (estimate_device_ledger(lambda apart=apart: make(apart), BF16, A100) for apart in (True, False))
    assert outside.by_format.get("fp32", 0) < 32 * 512 * 4 <= inside.by_format["fp32"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_attention_keeps_no_matrix_of_scores(precision: str) -> None:
    tokens, heads = 512, 4

    def make() -> Case:
        layer = nn.TransformerEncoderLayer(32, heads, 32, dropout=0.1, batch_first=True)
        return build_case(layer, summed, torch.randn(2, tokens, 32))

    scores = 2 * heads * tokens * tokens * 2
    assert estimate_device_ledger(make, StepSetting(precision=precision), A100).whole["activations"] < scores


@pytest.mark.wording
def test_a_loss_that_cuda_refuses_is_told_with_its_line_and_what_to_do() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(batch).sigmoid(), torch.zeros_like(batch[:, :1]))

    def make() -> Case:
        return build_case(nn.Linear(8, 1), loss_fn, torch.randn(4, 8))

    with pytest.raises(PrecisionRefused, match="binary_cross_entropy in bf16") as told:
        estimate_device_ledger(make, BF16, A100)
    assert f"{__file__}:{loss_fn.__code__.co_firstlineno + 1}" in told.value.given
    assert "BCEWithLogitsLoss" in told.value.do
    assert estimate_device_ledger(make, StepSetting(), A100).peak > 0
    assert estimate_ledger(make, BF16).peak > 0

    apart = island(nn.BCELoss())

    def wide_loss(model: nn.Module, batch: Tensor) -> Tensor:
        return apart(model(batch).sigmoid(), torch.zeros_like(batch[:, :1]))

    assert (
        estimate_device_ledger(lambda: build_case(nn.Linear(8, 1), wide_loss, torch.randn(4, 8)), BF16, A100).peak > 0
    )


def test_a_layer_that_asks_the_driver_is_estimated_by_the_cpu_s_rules_and_says_so() -> None:
    def make() -> Case:
        return build_case(nn.LSTM(8, 8), lambda model, batch: model(batch)[0].sum(), torch.randn(4, 2, 8))

    found = estimate_device_ledger(make, StepSetting(), A100)
    if not torch.cuda.is_available():
        assert "by the CPU's rules" in found.notes[-1]
        assert found.at_peak == estimate_ledger(make, StepSetting()).at_peak
    assert not found.verified


def test_autocast_inside_a_loss_is_on_as_on_a_gpu() -> None:
    """A person's loop often has its own autocast; without a GPU torch would switch it off."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).float().sum()

    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    found = estimate_device_ledger(lambda: build_case(model, loss_fn, torch.randn(32, 64)), StepSetting(), A100)
    assert found.by_format["bf16"] >= 32 * 512 * 2
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())
