"""Emulated formats: their grid is torch's to the bit, the arithmetic is wide, and everything has its place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, Format
from halfstep.observe.emulate import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    FormatEmulator,
    OperandRounder,
    OutputRounder,
    compute_full_range_factor,
    round_to_format,
)
from halfstep.observe.recorder import Recorder

INF, NAN = math.inf, math.nan
SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 65504.0, 65519.9, 65520.0, 1e-8, -1e-8, 6e-8, 1e-40])
NARROW = [FP16, BF16]


def numbers(format: Format) -> Tensor:
    """Every finite number of a format that is not negative, in order, read from its bits."""
    assert format.dtype is not None
    if format.dtype.itemsize == 1:
        found = torch.arange(128, dtype=torch.uint8).view(format.dtype).double()
    else:
        found = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(format.dtype).double()
    return found[found.isfinite()]


@pytest.mark.parametrize("format", [FP16, BF16, FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
def test_numbers_go_to_the_nearest_one_and_halves_to_the_even_one(format: Format) -> None:
    grid = numbers(format)
    grid = grid[grid < 1e38] if format is BF16 else grid
    between = (grid[1:] + grid[:-1]) / 2
    exact = between.float().double() == between  # bf16's smallest halves are below fp32's smallest number
    low, high, between = grid[:-1][exact], grid[1:][exact], between[exact]
    even = torch.arange(len(grid) - 1)[exact] % 2 == 0
    expected = torch.where(even, low, high)
    assert torch.equal(round_to_format(format, between.float()).double(), expected)
    assert torch.equal(round_to_format(format, -between.float()).double(), -expected)
    above = torch.nextafter(between.float(), torch.tensor(INF))
    assert torch.equal(round_to_format(format, above).double(), high)
    assert torch.equal(round_to_format(format, grid.float()).double(), grid)


def test_zero_keeps_its_sign_and_nan_stays() -> None:
    for format in (FP16, BF16, FP8_E4M3, FP8_E5M2):
        out = round_to_format(format, torch.tensor([0.0, -0.0, NAN]))
        assert out.signbit()[:2].tolist() == [False, True]
        assert out[2].isnan()
    assert round_to_format(FP8_E5M2, torch.tensor([INF, -INF, 1e9])).tolist() == [INF, -INF, INF]


def bits(tensor: Tensor) -> Tensor:
    """Comparable to the bit, but for the many ways to write NaN."""
    return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor).view(torch.int16), tensor.isnan()  # type: ignore[return-value]


def emulated(rounding: FormatEmulator, call: Any, model: nn.Module | None = None) -> Any:
    with Recorder(model or nn.Identity(), rounding, rounding.run):
        return call()


@pytest.mark.parametrize("format", NARROW, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * x, lambda x: x + 3.5, lambda x: x.exp(), lambda x: x.neg(), lambda x: x.relu(), lambda x: 1 / x,
        lambda x: x.clone().mul_(1000), lambda x: x.clone().div_(7), lambda x: x.sqrt(), lambda x: x.tanh(),
        lambda x: torch.where(x > 0, x, -x), lambda x: torch.cat([x, x]) * 3, lambda x: x[::2] * 0.1,
    ],
)  # fmt: skip
def test_operations_give_what_torch_gives_to_the_bit(format: Format, call: Any) -> None:
    x = torch.cat([SPECIAL, torch.randn(500), torch.randn(500) * 1e-4, torch.randn(500) * 1e4]).to(format.dtype)
    ours, torchs = emulated(OutputRounder(format), lambda: call(x)), call(x)
    assert ours.dtype is torchs.dtype is format.dtype
    for one, other in zip(bits(ours), bits(torchs), strict=True):
        assert torch.equal(one, other)


def test_results_keep_the_dtypes_that_torch_gives_them() -> None:
    x = torch.randn(2, 3, 8).half()
    calls = [
        lambda: x + torch.randn(8), lambda: x > 0, lambda: x.sum(dtype=torch.float32), lambda: x.float() * 2,
        lambda: x.argmax(-1), lambda: x.softmax(-1), lambda: x.max(-1), lambda: x.nonzero(), lambda: x.half() @ x.mT,
        lambda: nn.functional.layer_norm(x, [8]), lambda: nn.functional.max_pool1d(x, 2, return_indices=True),
    ]  # fmt: skip
    for call in calls:
        ours, torchs = emulated(OutputRounder(FP16), call), call()
        assert [t.dtype for t in (ours if isinstance(ours, tuple) else [ours])] == [
            t.dtype for t in (torchs if isinstance(torchs, tuple) else [torchs])
        ]


def test_views_and_writes_still_reach_the_same_memory() -> None:
    x, out = torch.ones(4, 4).half(), torch.zeros(4, 4).half()

    def call() -> Tensor:
        x[0].mul_(3)
        x.t()[:, 1].add_(70000.0)
        torch.mul(x, 2, out=out)
        return x.view(16)

    rounding = OutputRounder(FP16)
    view = emulated(rounding, call)
    assert view.data_ptr() == x.data_ptr()
    assert x[0].tolist() == [3.0] * 4
    assert x[1].tolist() == [INF] * 4
    assert torch.equal(out, x * 2)
    assert rounding.ranges.by_place["(outside the model)", FORWARD].overflows == 4


def test_what_overflows_vanishes_or_is_subnormal_is_counted() -> None:
    x = torch.tensor([300.0, 1e-3, 1e-4, 2e-2, 0.0, INF, NAN]).half()
    rounding = OutputRounder(FP16)
    emulated(rounding, lambda: x * x)
    found = rounding.ranges.by_place["(outside the model)", FORWARD]
    # 90000 overflows, 1e-6 is subnormal, 1e-8 vanishes, 4e-4 is fine; inf and NaN were so before.
    assert (found.overflows, found.subnormals, found.underflows) == (1, 1, 1)
    assert found.nonzero == 6
    assert found.largest == 90000.0
    assert found.headroom == pytest.approx(math.log2(65504 / 90000))
    event = rounding.ranges.first_overflow[FORWARD]
    assert (event.operation, event.value, event.largest) == ("aten.mul", 90000.0, 65504.0)


def test_nothing_at_all_is_no_error() -> None:
    rounding = OutputRounder(FP16)
    assert emulated(rounding, lambda: torch.zeros(0, 3).half() * 2).shape == (0, 3)
    assert rounding.ranges.by_place == {}
    fp8 = OperandRounder(FP8_E4M3, FP8_E5M2, compute_full_range_factor)
    assert emulated(fp8, lambda: torch.zeros(0, 3).bfloat16() @ torch.ones(3, 2).bfloat16()).shape == (0, 2)
    assert emulated(fp8, lambda: torch.zeros(2, 3).bfloat16() @ torch.ones(3, 1).bfloat16()).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_linear_layer_is_what_autocast_computes(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(32, 64)
    with torch.autocast("cpu", dtype=dtype):
        torchs = model(x)
        ours = emulated(OutputRounder(FP16 if dtype is torch.float16 else BF16), lambda: model(x), model)
    assert ours.dtype is torchs.dtype is dtype
    # One step of the format at the size of the result: sums in another order may round to the neighbor.
    assert (ours.float() - torchs.float()).abs().max() <= torch.finfo(dtype).eps * torchs.float().abs().max()


class Spy(TorchDispatchMode):
    """Sees what a recorder inside it really calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func._overloadpacket), [a.dtype for a in args if isinstance(a, Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounding", [OutputRounder(FP16), OperandRounder(FP8_E4M3, FP8_E5M2)], ids=["fp16", "fp8"])
def test_convolutions_compute_in_fp32_forward_and_backward(rounding: FormatEmulator) -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    with Spy() as spy, Recorder(model, rounding, rounding.run):
        with torch.autocast("cpu", dtype=rounding.carrier):
            out = model(x)
        assert out.dtype is rounding.carrier
        out.float().square().mean().backward()
    convolutions = {name: set(dtypes) for name, dtypes in spy.seen if "convolution" in name}
    assert convolutions == {"aten.convolution": {torch.float32}, "aten.convolution_backward": {torch.float32}}
    assert model.weight.grad is not None
    assert model.weight.grad.count_nonzero() > 0


def test_weights_are_told_from_results_and_each_cast_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    x = torch.randn(3, 4)
    rounding = OutputRounder(FP16)
    with torch.autocast("cpu", dtype=torch.float16):
        emulated(rounding, lambda: model(model(x)), model)
    assert rounding.ranges.by_place["0", WEIGHTS].nonzero == 16  # autocast keeps the cast for the second call
    assert rounding.ranges.by_place["0", FORWARD].nonzero == 12 + 12 + 12  # the input's cast and two results


def test_a_gradient_belongs_to_the_layer_although_batches_are_counted_after_it() -> None:
    model, rounding = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), OutputRounder(FP16)

    def call() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(2, 3, 4, 4))
        out.float().square().mean().mul(1e6).backward()

    emulated(rounding, call, model)
    assert rounding.ranges.by_place["0", BACKWARD].nonzero == 4 * 3 + 4


def test_fp8_rounds_operands_to_e4m3_and_gradients_to_e5m2() -> None:
    x, w = torch.randn(5, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    grad = torch.randn(5, 6).bfloat16() * 100
    x.requires_grad_()
    w.requires_grad_()
    rounding = OperandRounder(FP8_E4M3, FP8_E5M2)

    def call() -> Tensor:
        out = x @ w.t()
        out.backward(grad)
        return out

    out = emulated(rounding, call).detach()
    qx, qw = (round_to_format(FP8_E4M3, t.detach().float()) for t in (x, w))
    qg = round_to_format(FP8_E5M2, grad.float())
    assert torch.equal(out, (qx @ qw.t()).bfloat16())
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, (qg @ qw).bfloat16())
    assert torch.equal(w.grad, (qg.t() @ qx).bfloat16())
    assert rounding.ranges.total(FORWARD).nonzero == x.numel() + w.numel()
    assert rounding.ranges.total(BACKWARD).nonzero == 2 * grad.numel()


def test_a_scale_for_each_tensor_uses_the_whole_range() -> None:
    for size in (1e-6, 1.0, 1e5):
        x, rounding = (torch.rand(8, 8) + 1) * size, OperandRounder(FP8_E4M3, FP8_E5M2, compute_full_range_factor)
        out = emulated(rounding, lambda x=x: x.bfloat16() @ torch.eye(8).bfloat16())
        assert ((out.float() - x).abs() / x).max() < 2 * FP8_E4M3.epsilon
        assert rounding.ranges.total(FORWARD).overflows == 0
    as_it_is = OperandRounder(FP8_E4M3, FP8_E5M2)
    emulated(as_it_is, lambda: (torch.ones(8, 8) * 1e5).bfloat16() @ torch.eye(8).bfloat16())
    # However torch casts to a format without an inf, it did not fit.
    assert as_it_is.ranges.total(FORWARD).overflows == 64


def test_fp32_work_is_left_alone() -> None:
    rounding, x = OutputRounder(FP16), torch.randn(4, 4)
    assert torch.equal(emulated(rounding, lambda: x @ x * 1e9), x @ x * 1e9)
    assert rounding.ranges.by_place == {}


def test_a_result_that_is_no_tensor_stays_as_it_is() -> None:
    """An operation may give nothing in one format where it gives a tensor in another."""
    rounding = OutputRounder(FP16)
    assert rounding._round(None, torch.float16) is None
    assert rounding._round(3, torch.float16) == 3
