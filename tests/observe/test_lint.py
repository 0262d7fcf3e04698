"""Numerics lint: each planted mistake is found with its numbers and its line, and healthy code is left alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from halfstep.formats import BF16, FP16, Format
from halfstep.observe.emulate import OutputRounder
from halfstep.observe.lint.calls import LossFunctionCalls
from halfstep.observe.lint.listener import LintListener, PlacedFinding
from halfstep.observe.recorder import Recorder

Forward = Callable[["Planted", Tensor], Tensor]


class Planted(nn.Module):
    """A linear layer, and then whatever a test plants."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("places", torch.arange(1000.0))
        self.register_buffer("close", torch.linspace(1.0, 1.001, 8))
        self.planted = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.planted(self, x)


def spotted(
    forward: Forward, format: Format = BF16, x: Tensor | None = None, model: nn.Module | None = None
) -> list[PlacedFinding]:
    torch.manual_seed(0)
    model = model or Planted(forward)
    rounding, lint = OutputRounder(format), LintListener(model)

    # Without a file, as halfstep's own frames are no user code: the line of an operation is that of the planted code.
    both = compile("lambda operation: (rounding(operation), lint(operation))", "<listen>", "eval")
    listen = eval(both, {"rounding": rounding, "lint": lint})
    with Recorder(model, listen, rounding.run), ExitStack() as active:
        active.enter_context(torch.autocast("cpu", dtype=format.dtype))
        active.enter_context(LossFunctionCalls("cpu", lint.emit))
        model(torch.randn(4, 8) if x is None else x)
    return list(lint.spotted())


def one(forward: Forward, format: Format = BF16, x: Tensor | None = None) -> PlacedFinding:
    (found,) = spotted(forward, format, x)
    assert found.line is not None
    assert found.line.startswith(str(Path("tests/observe/test_lint.py")))
    return found


def timesteps(model: Planted, x: Tensor) -> Tensor:
    return model.layer(torch.tensor([[999.0, 998.0, 3, 0, 1, 2, 4, 5]]))


@pytest.mark.wording
def test_timesteps_that_become_one_another() -> None:
    found = one(timesteps)
    assert found.finding.id == "integers-rounded"
    assert found.module == "layer"
    assert "integers up to 999 are rounded to bf16, which counts to 256: 999 becomes 1000" in found.finding.evidence
    assert 'island(model, "layer")' in found.finding.fix
    assert spotted(timesteps, FP16) == [], "fp16 counts to 2048"


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[256.0, 3, 0, 1, 2, 4, 5, 6]]),  # as far as it counts
        torch.tensor([[999.5, 3, 0, 1, 2, 4, 5, 6]]),  # not whole: features
        torch.tensor([[0, -1e4, 0, 0, -1e4, 0, 0, 0.0]]),  # a mask
        torch.tensor([[999.0, -1000, 3, 4, 5, 6, 7, 8]]),  # measured values
        torch.tensor([[1e12, 3, 0, 1, 2, 4, 5, 6]]),  # so large that fp32 has whole numbers only
        torch.randint(0, 4000, (2, 3, 4, 8)).float(),  # a picture in whole numbers
    ],
)
def test_numbers_that_are_no_places_are_left_alone(given: Tensor) -> None:
    assert spotted(lambda model, x: model.layer(given)) == []


@pytest.mark.wording
def test_whole_numbers_that_meet_narrow_ones() -> None:
    steps = torch.tensor([[1001], [5], [6], [7]])
    found = one(lambda model, x: model.layer(x) * steps)
    assert found.finding.id == "integers-rounded"
    assert "1001 becomes 1000" in found.finding.evidence


@pytest.mark.wording
def test_counting_in_a_narrow_format() -> None:
    found = one(lambda model, x: torch.arange(1000, dtype=torch.bfloat16))
    assert found.finding.id == "integers-rounded"
    assert "arange of 1000 numbers" in found.finding.evidence
    assert spotted(lambda model, x: torch.arange(256, dtype=torch.bfloat16)) == []


@pytest.mark.wording
def test_a_buffer_that_is_told_apart_by_small_differences() -> None:
    found = one(lambda model, x: model.layer(model.close))
    assert found.finding.id == "positions-merged"
    assert "buffer close contains 8 numbers in order; cast to bf16, 1 of them differ" in found.finding.evidence


@pytest.mark.wording
def test_a_buffer_that_was_cast_with_the_model() -> None:
    model = Planted(lambda model, x: model.layer(x))
    model.places = model.places.bfloat16()
    (found,) = spotted(model.planted, model=model)
    assert found.finding.id == "positions-merged"
    assert "buffer places counts to 1000" in found.finding.evidence


@pytest.mark.wording
@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda model, x: 1 / (model.layer(x).relu() + 1e-8), "1e-08 is 0 in fp16"),
        (lambda model, x: F.normalize(model.layer(x)), "1e-12 is 0 in fp16"),
        (lambda model, x: model.layer(x).sigmoid().clamp(1e-4, 1 - 1e-6).log(), "the bound 0.999999 is 1 in fp16"),
        (lambda model, x: 1 - torch.full((9,), 1e-4, dtype=torch.float16), "1 - x is 1 in fp16 for 9 of 9"),
        (lambda model, x: F.normalize(model.layer(x)), "by the CPU's rules: CUDA's autocast computes norms in fp32"),
        (lambda model, x: torch.maximum(model.layer(x), torch.tensor(1e-9)), "maximum with it protects nothing"),
        (lambda model, x: torch.minimum(model.layer(x), torch.tensor(1 - 1e-6)), "the bound 0.999999 is 1 in fp16"),
        (lambda model, x: model.layer(x).clamp(-1 + 1e-6, 1).atanh(), "the bound -0.999999 is -1 in fp16"),
        (lambda model, x: torch.logit(model.layer(x).sigmoid(), eps=1e-6), "the bound 0.999999 is 1 in fp16"),
        (lambda model, x: torch.logit(model.layer(x).sigmoid(), eps=1e-9), "logit with it protects nothing"),
        (lambda model, x: model.layer(x).masked_fill(x > 0, 1e-9), "masked_fill with it protects nothing"),
        (lambda model, x: torch.full_like(model.layer(x), 1e-9), "full_like with it protects nothing"),
        (lambda model, x: torch.where(x > 0, model.layer(x), 1e-9), "where with it protects nothing"),
    ],
)
def test_an_eps_that_vanishes(forward: Forward, words: str) -> None:
    found = one(forward, FP16)
    assert found.finding.id == "eps-vanishes"
    assert words in found.finding.evidence


def test_an_eps_that_is_there_is_left_alone() -> None:
    assert spotted(lambda model, x: 1 / (model.layer(x).relu() + 1e-6), FP16) == []
    assert spotted(lambda model, x: 1 / (model.layer(x).relu() + 1e-8), BF16) == []
    assert spotted(lambda model, x: (model.layer(x).float() + 1e-12).log(), FP16) == []
    assert spotted(lambda model, x: model.layer(x).clamp(-1.0001, 1.0001), FP16) == [], (
        "a bound beyond 1 lets 1 through"
    )
    assert spotted(lambda model, x: torch.logit(model.layer(x).sigmoid(), eps=1e-3), FP16) == []
    (found,) = spotted(lambda model, x: 1 / (model.layer(x).relu() + 1e-8), FP16)
    assert "rules" not in found.finding.evidence, "no norm"


@pytest.mark.wording
def test_a_sum_that_does_not_fit() -> None:
    found = one(lambda model, x: (model.layer(x).abs() * 0 + 9000).sum(), FP16)
    assert found.finding.id == "reduction-overflows"
    assert found.finding.severity == "error"
    assert "sum over 32 numbers is 288000, and fp16 ends at 65504" in found.finding.evidence
    assert spotted(lambda model, x: (model.layer(x).abs() * 0 + 9000).mean(), FP16) == []


@pytest.mark.wording
def test_ones_that_are_counted_in_a_narrow_format() -> None:
    found = one(lambda model, x: torch.ones(1001, dtype=torch.bfloat16).cumsum(0))
    assert found.finding.id == "count-rounded"
    assert "cumsum counts 514 ones as 512: bf16 counts to 256" in found.finding.evidence
    assert spotted(lambda model, x: torch.ones(1001).cumsum(0)) == []
    assert spotted(lambda model, x: torch.ones(1001, dtype=torch.bfloat16).sum()) == [], "rounded once"


BY_MASK = TorchVersion(torch.__version__) >= (2, 15)  # type: ignore[operator]


def put(into: Tensor, where: Any, value: float) -> Tensor:
    into[where] = value
    return into


@pytest.mark.wording
@pytest.mark.parametrize(
    ("forward", "severity"),
    [
        (lambda model, x: model.layer(x).masked_fill(x > 0, -1e9), "error"),
        (lambda model, x: model.layer(x) + torch.where(x > 0, 0.0, -1e9).half(), "warning"),
        (lambda model, x: model.layer(x) + -1e5, "warning"),
        (lambda model, x: torch.where(x > 0, model.layer(x), -1e9), "warning"),
        (lambda model, x: torch.where(x > 0, model.layer(x), torch.tensor(-1e9)), "warning"),
        (lambda model, x: torch.where(x > 0, model.layer(x), torch.tensor(-1e9, dtype=torch.float16)), "warning"),
        # From torch 2.15 on, it is masked_fill_, which refuses the number.
        (lambda model, x: put(model.layer(x).clone(), x > 0, -1e9), "error" if BY_MASK else "warning"),
        (lambda model, x: put(model.layer(x).clone(), (slice(None), 0), -(10**9)), "warning"),
        (lambda model, x: model.layer(x) + (x > 0).half() * -1e9, "warning"),
        (lambda model, x: torch.full_like(model.layer(x), -1e9), "error"),
        (lambda model, x: model.layer(x).clone().index_fill_(0, torch.tensor([0]), -1e9), "error"),
    ],
)
def test_a_mask_that_becomes_infinite(forward: Forward, severity: str) -> None:
    found = one(forward, FP16)
    assert found.finding.id == "mask-overflows"
    assert found.finding.severity == severity
    assert "-inf in fp16, which ends at 65504" in found.finding.evidence


def test_masks_that_fit_or_are_meant() -> None:
    assert spotted(lambda model, x: model.layer(x).masked_fill(x > 0, -torch.inf), FP16) == []
    assert spotted(lambda model, x: model.layer(x).masked_fill(x > 0, -1e9), BF16) == []
    assert spotted(lambda model, x: torch.where(x > 0, model.layer(x), -torch.inf), FP16) == []
    assert spotted(lambda model, x: put(model.layer(x).clone(), x > 0, -torch.inf), FP16) == []
    assert spotted(lambda model, x: put(model.layer(x).float().clone(), x > 0, -1e9), FP16) == []
    assert spotted(lambda model, x: model.layer(x) * 1e-4 * 1e6, FP16) == [], "the product fits"
    assert spotted(lambda model, x: model.layer(x) + torch.where(x > 0, 0.0, -6e4).half(), FP16) == []
    lowest = torch.finfo(torch.float32).min
    (found,) = spotted(lambda model, x: model.layer(x) + torch.where(x > 0, 0.0, lowest).bfloat16(), BF16)
    assert found.finding.id == "mask-overflows", "fp32's lowest number does not fit bf16 either"


def angles(first: int, dtype: torch.dtype) -> Forward:
    rates = 10000 ** (-torch.arange(16) / 16)
    return lambda model, x: (torch.arange(first, first + 8)[:, None].to(dtype) * rates.to(dtype)).sin().bfloat16()


@pytest.mark.wording
def test_angles_that_cannot_be_told_apart() -> None:
    found = one(angles(200, torch.bfloat16))
    assert found.finding.id == "angles-rounded"
    assert "sin of angles up to 116.5 in bf16, which has a spacing of 0.5 there" in found.finding.evidence
    assert spotted(angles(200, torch.float32)) == []
    assert spotted(angles(0, torch.bfloat16)) == []
    assert spotted(lambda model, x: torch.arange(200, 208).bfloat16().cos()) == [], "whole numbers are exact"
    assert spotted(lambda model, x: model.layer(x).sin()) == []


@pytest.mark.wording
def test_probabilities_that_are_not_those_computed() -> None:
    many = torch.randn(8, 8 * 500)
    found = one(lambda model, x: (model.layer(x).sum() * 0 + many.bfloat16()).log_softmax(-1))
    assert found.finding.id == "softmax-in-half"
    assert "log_softmax over 4000 numbers is computed in bf16" in found.finding.evidence
    assert spotted(lambda model, x: (model.layer(x).sum() * 0 + many.bfloat16()).softmax(-1)) == []
    assert spotted(lambda model, x: F.cross_entropy(many.bfloat16(), torch.arange(8))) == []


def test_a_variance_of_rounding() -> None:
    far = 1000 + 3 * torch.randn(16, 8)
    found = one(lambda model, x: F.layer_norm((model.layer(x).sum() * 0 + far.bfloat16()), (8,)))
    assert found.finding.id == "variance-of-rounding"
    near = 3 + torch.randn(16, 8)
    assert spotted(lambda model, x: F.layer_norm((model.layer(x).sum() * 0 + near.bfloat16()), (8,))) == []
    constant = torch.full((16, 8), 1000.0)
    assert spotted(lambda model, x: F.layer_norm((model.layer(x).sum() * 0 + constant.bfloat16()), (8,))) == []


def by_hand(model: Planted, x: Tensor) -> Tensor:
    y = (model.layer(x) * 0 + 10 + x / 100).bfloat16()
    return (y - y.mean(-1, keepdim=True)) * (y.square().mean(-1) - y.mean(-1).square() + 1e-5).abs().rsqrt()[:, None]


def test_a_variance_as_a_difference() -> None:
    found = one(by_hand)
    assert found.finding.id == "variance-in-half"
    assert spotted(lambda model, x: (model.layer(x) - model.layer(x)).tanh()) == [], "no root is taken of it"


def test_a_loss_that_cuda_refuses() -> None:
    found = one(lambda model, x: F.binary_cross_entropy(model.layer(x).sigmoid().float(), (x > 0).float()))
    assert found.finding.id == "loss-refused"
    with_logits = lambda model, x: F.binary_cross_entropy_with_logits(model.layer(x), (x > 0).float())  # noqa: E731
    assert spotted(with_logits) == []

    def outside(model: Planted, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.binary_cross_entropy(model.layer(x).sigmoid(), (x > 0).float())

    assert spotted(outside) == []


@pytest.mark.wording
def test_a_loop_inside_the_loss() -> None:
    def whole(model: Planted, x: Tensor) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        loss = model.layer(x).float().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = spotted(whole)
    assert [one.finding.id for one in found] == ["loop-in-loss", "loop-in-loss"]
    assert "backward() is called inside the loss function, under autocast" in found[0].finding.evidence
    assert "SGD.step()" in found[1].finding.evidence
    assert found[0].line != found[1].line
    assert spotted(lambda model, x: model.layer(x)) == [], "the hook on optimizers is gone"


@pytest.mark.wording
def test_weights_that_are_stored_narrow() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    (found,) = spotted(lambda model, x: x, model=model)
    assert found.finding.id == "weights-narrow"
    assert "2 of 2 trained weights are stored in bf16, 0.weight first" in found.finding.evidence
    model.requires_grad_(False)
    assert spotted(lambda model, x: x, model=model) == []


@pytest.mark.wording
def test_the_same_in_many_modules_is_told_once() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16() + 1e-50

    (found,) = spotted(lambda model, x: x, model=nn.Sequential(Block(), Block(), Block()))
    assert found.modules == ("0", "1", "2")
    assert "in 0 and 2 more: 1e-50 is 0 in bf16" in found.finding.evidence
    assert found.as_dict()["modules"] == ["0", "1", "2"]


@pytest.mark.parametrize("format", [BF16, FP16])
def test_healthy_models_and_empty_or_spoiled_numbers(format: Format) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert spotted(lambda model, x: x, format, torch.randn(2, 5, 16), model=layer) == []
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4))
    assert spotted(lambda model, x: x, format, torch.rand(2, 3, 8, 8) * 255, model=convolutions) == []
    assert spotted(lambda model, x: model.layer(x), format, torch.zeros(0, 8)) == []
    assert spotted(lambda model, x: model.layer(x).sum().log(), format, torch.full((4, 8), torch.nan)) == []
