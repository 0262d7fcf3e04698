"""Would it survive? Planted overflows are named with their value, healthy models pass, and nothing of ours is moved."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Counted, island
from halfstep.draw.terminal import render_plain_text
from halfstep.errors import UnknownName, WrongUse
from halfstep.measure.subject import Subject
from halfstep.measure.survival import survival
from halfstep.measure.survival_report import build_survival_page
from halfstep.observe.emulate import BlockRounder
from tests.support.models import buffered_model


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


class Net(nn.Module):
    """A small convolutional net; `gain` is how large its bottleneck's weights are."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.neck = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)
        self.neck[0].weight.data.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(self.stem(x).relu()).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain, self.qkv = gain, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q * self.gain) @ (k * self.gain).mT).softmax(-1) @ v


IMAGES = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])


def test_a_convolution_that_overflows_is_named_with_its_value_and_a_cure_that_works() -> None:
    model = Net(1e5)
    # The value that does not fit, from fp32 with what arrives rounded as fp16 would round it.
    with torch.no_grad():
        arrives = model.stem(IMAGES[0]).relu()
        value = F.conv2d(arrives, model.neck[0].weight.half().float()).abs().max().item()
    found = survival(model, classify, IMAGES)
    assert not found.survives
    assert found.loss is None
    assert found.first_overflow is not None
    assert (found.first_overflow.module, found.first_overflow.operation) == ("neck.0", "aten.convolution")
    assert found.first_overflow.value == pytest.approx(value, rel=0.01)
    assert found.verdict.startswith("fp16: overflows in neck.0 (aten.convolution): ")
    assert found.verdict.endswith("against 65,504; bf16 survives")
    worst = found.modules[0]
    assert worst.module == "neck.0"
    assert worst.overflows > 0
    assert worst.headroom_bits == pytest.approx(math.log2(65504 / value), abs=0.1)
    # An island of the convolution alone gives back fp16, which is too small for it; its parent normalizes first.
    assert found.do == ('island(model, "neck")', 'precision="bf16"')
    cured = copy.deepcopy(model)
    island(cured, "neck")
    assert survival(cured, classify, IMAGES).survives


def test_a_weight_that_does_not_fit_is_named_as_such() -> None:
    model = Net(1.0)
    model.head.weight.data[1, 2] = -91400.0
    found = survival(model, classify, IMAGES)
    assert found.verdict.startswith("fp16: overflows in head (weight): 91,400 against 65,504")


def test_attention_whose_logits_overflow() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Attention(2000.0))
    found = survival(model, mse, torch.randn(2, 6, 16))
    assert found.first_overflow is not None
    assert (found.first_overflow.module, found.first_overflow.operation) == ("1", "aten.bmm")
    assert found.do[0] == 'island(model, "1")'
    assert survival(nn.Sequential(nn.Linear(16, 16), Attention(1.0)), mse, torch.randn(2, 6, 16)).survives


def test_a_sum_outside_the_model_that_overflows_while_the_loss_stays_finite() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return out.float().square().mean() + 1 / out.square().add(1).sum().float()

    model, x = nn.Linear(64, 1024), torch.randn(64, 64)
    found = survival(model, loss, x)
    assert not found.survives
    assert found.loss is not None
    assert found.first_overflow is not None
    assert (found.first_overflow.module, found.first_overflow.operation) == ("(outside the model)", "aten.sum")
    assert found.first_overflow.value > 65536
    assert "though the loss is finite" in found.verdict
    assert found.do[0].startswith("halfstep.widen(...)")
    assert any("CUDA's autocast computes sum in fp32" in note for note in found.notes)
    assert found.notes[0] == "rules: CPU autocast"


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_healthy_models_survive(name: str) -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # with dropout: all steps draw the same
    pull = torch.randn(2, 6, 16)
    for found in (
        survival(Net(1.0), classify, IMAGES, format_name=name),
        survival(encoder, lambda m, x: (m(x) - pull).square().mean(), torch.randn(2, 6, 16), format_name=name),
    ):
        assert found.survives, found.verdict
        assert found.do == ()
        assert found.first_overflow is None
        assert found.loss == pytest.approx(found.loss_fp32, rel=0.01)
        assert found.gradient_error is not None
        assert found.gradient_error < (0.003 if name == "fp16" else 0.1)
        assert found.loss_scale == (65536.0 if name == "fp16" else None)


def test_nvfp4_rounds_each_block_of_sixteen_to_e2m1() -> None:
    rounding = BlockRounder()
    row = torch.tensor([6.0, 0.24, 0.26, -0.76, 1.3, 1.8, 2.4, -2.6, 3.4, 3.6, 4.9, -5.1, 0.0, 1.0, 1.5, 2.0])
    wanted = torch.tensor([6.0, 0.0, 0.5, -1.0, 1.5, 2.0, 2.0, -3.0, 3.0, 4.0, 4.0, -6.0, 0.0, 1.0, 1.5, 2.0])
    # A block a thousand times as large keeps the numbers of its neighbor: each has its own scale.
    both = torch.stack([torch.cat([row, 1024 * row])] * 3)
    torch.testing.assert_close(
        rounding._operand(both, -1), torch.stack([torch.cat([wanted, 1024 * wanted])] * 3), rtol=0.04, atol=0.0
    )
    torch.testing.assert_close(rounding._operand(both.T, -2), rounding._operand(both, -1).T)
    assert rounding._operand(torch.zeros(3, 20), -1).count_nonzero() == 0


def test_a_step_in_nvfp4_is_further_from_fp32_than_in_fp8() -> None:
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(64, 64)
    pull = torch.randn(64, 8)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).float() - pull).square().mean()

    fp8 = survival(model, loss, batch, format_name="fp8_e4m3").scaled
    found = survival(model, loss, batch, format_name="nvfp4")
    assert fp8 is not None
    assert fp8.gradient_error is not None
    assert found.gradient_error is not None
    assert 1.5 * fp8.gradient_error < found.gradient_error < 0.5
    assert found.survives
    assert found.verdict.startswith("nvfp4: survives; its gradients differ from fp32's by ")
    again = survival(model, loss, batch, format_name="nvfp4")
    assert again.gradient_error == found.gradient_error


def test_gradients_that_vanish_are_saved_by_the_loss_scale() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.randn(16, 8)
    found = survival(model, lambda m, x: mse(m, x) * 1e-8, x)
    assert found.gradient_underflow_unscaled is not None
    assert found.gradient_underflow_unscaled > 0.9
    assert found.gradient_underflow < 0.1
    assert found.survives
    hopeless = survival(model, lambda m, x: mse(m, x) * 1e-14, x)
    assert not hopeless.survives
    assert "gradients vanish" in hopeless.verdict
    assert hopeless.gradient_lost == pytest.approx(1.0)
    assert {gradient.parameter for gradient in hopeless.lost} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert hopeless.lost[0].largest >= hopeless.lost[-1].largest > 0
    assert survival(model, lambda m, x: mse(m, x) * 1e-14, x, format_name="bf16").survives


def test_the_loss_scale_falls_until_gradients_fit() -> None:
    model, x = nn.Linear(8, 2), torch.randn(16, 8)
    found = survival(model, lambda m, x: mse(m, x) * 1000, x)
    assert found.survives
    assert found.loss_scale is not None
    assert 1.0 <= found.loss_scale < 65536.0
    none = survival(model, lambda m, x: mse(m, x) * 1e7, x)
    assert not none.survives
    assert none.loss_scale is None
    assert none.loss is not None
    assert "gradients overflow" in none.verdict
    assert "down to 1" in none.verdict


def test_fp8_is_reported_as_it_is_and_with_a_scale_for_each_tensor() -> None:
    found = survival(Net(1e5), classify, IMAGES, format_name="fp8_e4m3")
    assert not found.survives
    assert found.first_overflow is not None
    assert (found.first_overflow.module, found.first_overflow.largest) == ("neck.0", 448.0)
    assert found.scaled is not None
    assert found.scaled.survives
    assert found.scaled.first_overflow is None
    assert "with a scale for each tensor it survives (gradients differ by " in found.verdict
    assert found.scaled.gradient_error is not None
    assert 0.003 < found.scaled.gradient_error < 0.5
    assert "scale for each tensor" in found.do[0]


def test_gradients_that_are_finite_and_lead_elsewhere_do_not_survive() -> None:
    def steep(model: nn.Module, x: Tensor) -> Tensor:
        return (60 * model(x).float()).sin().mean()  # a step that fp8 takes is a whole turn here, bf16's is not

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 32)
    found = survival(model, steep, x, format_name="fp8_e4m3")
    assert found.first_overflow is None
    assert found.gradient_lost is not None
    assert found.gradient_lost < 0.1
    assert found.gradient_error is not None
    assert found.gradient_error > 0.5
    assert not found.survives
    assert found.verdict.startswith("fp8_e4m3: does not survive: its gradients differ from fp32's by ")
    assert "bf16's by " in found.verdict
    assert 'precision="bf16"' in found.do
    assert survival(model, steep, x, format_name="bf16").survives


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_followed_step_by_step(kind: type[nn.RNNBase], name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.cell(x)[0])

    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    found = survival(Net(), mse, torch.randn(4, 5, 8), format_name=name)
    assert found.survives, found.verdict
    assert "cell" in {module.module for module in found.modules}
    assert torch._C._get_mkldnn_enabled() == before


def test_a_model_that_is_not_finite_anyway() -> None:
    model = nn.Linear(4, 2)
    model.weight.data[0, 0] = math.nan
    for name in ("fp16", "fp8_e5m2"):
        found = survival(model, mse, torch.randn(3, 4), format_name=name)
        assert not found.survives
        assert "not finite in fp32 either" in found.verdict
        assert found.do == ()
        json.dumps(found.as_dict(), allow_nan=False)


def test_a_division_by_what_vanished_is_placed() -> None:
    class Divides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (x.half() * 1e-9 if torch.is_autocast_enabled("cpu") else x * 1e-9)

    model = nn.Sequential(nn.Linear(4, 4), Divides(4, 4))
    found = survival(model, lambda m, x: m(x).float().mul(1e-9).square().mean(), torch.rand(3, 4) + 1)
    assert not found.survives
    assert "not finite though nothing overflows, first seen in 1 (aten.div)" in found.verdict


def test_nothing_of_the_person_is_touched() -> None:
    model, x = buffered_model(), torch.randn(6, 8)
    model(x).sum().backward()
    before, batch = copy.deepcopy(model.state_dict()), x.clone()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.manual_seed(7)
    state = torch.get_rng_state()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        batch.mul_(1.0 + torch.rand(()))
        return mse(model, batch)

    for name in ("fp16", "fp8_e4m3"):
        survival(model, loss, x, format_name=name)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if value is not None)
    assert len(gradients) == len(list(model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_interrupt_leaves_everything_as_it_was() -> None:
    model, state = Net(1.0), torch.get_rng_state()

    def interrupted(model: nn.Module, batch: Any) -> Tensor:
        classify(model, batch)
        if torch.is_autocast_enabled("cpu"):
            raise KeyboardInterrupt
        return classify(model, batch)

    with pytest.raises(KeyboardInterrupt):
        survival(model, interrupted, IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.is_autocast_enabled("cpu")


def test_losses_with_counts_and_by_name() -> None:
    x = torch.randn(6, 8)
    plain = survival(buffered_model(), mse, x)
    counted = survival(buffered_model(), lambda m, x: Counted(mse(m, x) * 24, torch.tensor(24)), x)
    by_name = survival(buffered_model(), lambda m, x: {"a": mse(m, x) / 2, "b": mse(m, x) / 2}, x)
    assert counted.loss == pytest.approx(plain.loss)
    assert by_name.loss == pytest.approx(plain.loss, rel=1e-3)


@pytest.mark.wording
def test_wrong_use_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'fp16'"):
        survival(nn.Linear(2, 2), mse, torch.randn(2, 2), format_name="fp61")
    with pytest.raises(WrongUse, match="without loss_fn"):
        survival(nn.Linear(2, 2))
    with pytest.raises(WrongUse, match=r"shape \(3, 2\) as the loss"):
        survival(nn.Linear(2, 2), lambda m, x: m(x), torch.randn(3, 2))


def test_the_page_says_the_verdict_first_and_what_to_type_last() -> None:
    case = Subject("tests.support.cases:convolutions").open()
    found = [survival(Net(1e5), classify, IMAGES), survival(case, format_name="fp8_e4m3")]
    lines = [line.rstrip() for line in render_plain_text(build_survival_page(found)).splitlines() if line.strip()]
    assert lines[0].startswith("fp16: overflows in neck.0 (aten.convolution)")
    assert lines[-2:] == ['  island(model, "neck")', '  precision="bf16"']
    assert max(map(len, lines)) <= 80
    held = survival(case)
    assert str(held).splitlines()[-1].startswith("  halfstep plan CASE")
    assert "<table" in held._repr_html_()
    assert "No format" in render_plain_text(build_survival_page([]))
