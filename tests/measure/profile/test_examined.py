"""What a profile looks at: kernels, layers, channels, torch's switches, compilations and data."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import island
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import build_case
from halfstep.measure.profile.examined import ProfiledCase, measure_warm_up, name_fp32_precision
from halfstep.measure.profile.operations import (
    TINY,
    ProfilerEvent,
    build_padded_layer,
    find_layer_channels,
    group_misaligned_layers,
    measure_misaligned_layer,
    measure_step_kernels,
    record_step_layers,
    sum_profiler_events,
)
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.timing import Stopwatch
from halfstep.precision.flags import create_fp32_scope
from halfstep.precision.precision import resolve_precision_name
from tests.support.cases import loss_fn

CPU = torch.device("cpu")
STEP = "halfstep: a step"
MS = 1_000_000
BF16, FP32 = ("c10::BFloat16",) * 3, ("float",) * 3


def on_cpu() -> list[ProfilerEvent]:
    """A step of 100 ms whose parts are round numbers, and one that was disturbed."""
    return [
        ProfilerEvent(STEP, 0, 100 * MS, number=1),
        ProfilerEvent("aten::linear", 1 * MS, 41 * MS, number=2, dtypes=BF16),
        ProfilerEvent("aten::to", 1 * MS, 11 * MS, number=3, dtypes=FP32),
        ProfilerEvent("aten::copy_", 1 * MS, 11 * MS, number=4, dtypes=FP32),
        ProfilerEvent("aten::addmm", 11 * MS, 41 * MS, number=5, dtypes=BF16),
        ProfilerEvent("aten::mm", 41 * MS, 51 * MS, number=6, dtypes=FP32),
        ProfilerEvent("aten::relu", 51 * MS, 56 * MS, number=7, dtypes=FP32),
        ProfilerEvent("aten::view", 56 * MS, 56 * MS + TINY - 1, number=8, dtypes=FP32),
        ProfilerEvent("autograd::engine::evaluate_function: AddmmBackward0", 57 * MS, 77 * MS, number=9),
        ProfilerEvent("aten::mkldnn_convolution", 60 * MS, 75 * MS, number=10, dtypes=BF16),
        ProfilerEvent("Optimizer.step#AdamW.step", 80 * MS, 95 * MS, number=11),
        ProfilerEvent("aten::mm", 82 * MS, 92 * MS, number=12, dtypes=FP32),
        ProfilerEvent(STEP, 200 * MS, 900 * MS, number=13),
        ProfilerEvent("aten::mm", 200 * MS, 900 * MS, number=14, dtypes=FP32),
    ]


def test_time_is_shared_out_among_parts_of_the_step_that_was_disturbed_least() -> None:
    found = sum_profiler_events(on_cpu())
    assert found.shares == pytest.approx(
        {"narrow": 0.45, "fp32": 0.10, "copies": 0.10, "update": 0.10, "other": 0.05, "host": 0.20}
    )
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.convolutions == pytest.approx(0.15)
    assert found.top["addmm [bf16]"] == pytest.approx(0.30)


def test_long_gaps_between_operations_belong_to_the_line_that_ran_in_them() -> None:
    lines = [(at * MS, "mine.py:7") for at in range(77, 80)] + [(97 * MS, None), (250 * MS, "mine.py:9")]
    # 3 ms between backward and update; the 5 ms at the end are nobody's.
    assert sum_profiler_events(on_cpu(), lines).code == {"mine.py:7": pytest.approx(0.05)}
    busy = [*on_cpu(), ProfilerEvent("kernel", 77 * MS, 83 * MS, asked_by=2, on_device=True)]
    assert sum_profiler_events(busy, lines).code == {}, "an accelerator computes meanwhile"


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.linear(x)


def test_a_line_that_waits_in_forward_is_named() -> None:
    case = build_case(Sleepy(), lambda model, x: model(x).square().mean(), torch.randn(4, 8))
    arm = Candidate(case, StepSetting("fp32"), observe=False)
    arm.step()
    (line, share), *_ = measure_step_kernels(arm.step, CPU).code.items()
    assert line.partition(":")[0].endswith("test_examined.py")
    assert share > 0.5


def test_switches_that_the_case_left_on_are_timed_without_and_left_as_they_were() -> None:
    threads = torch.get_num_threads()
    with torch.autograd.set_detect_anomaly(True):
        examined = ProfiledCase(
            build_case(nn.Linear(8, 8), loss_fn, (torch.randn(4, 8), torch.randn(4, 8))), "fp32", "cpu"
        )
        found = {one.name: one for one in examined.switches(0.05).switches}
        assert torch.is_anomaly_enabled()
    assert found["anomaly mode"].without > 0
    assert torch.get_num_threads() == threads
    assert not any(one.name == "anomaly mode" for one in examined.switches(0.05).switches)


def test_an_accelerators_own_time_counts_and_the_rest_is_the_hosts() -> None:
    events = [
        ProfilerEvent(STEP, 0, 100 * MS, number=1),
        ProfilerEvent("aten::mm", 0, 1 * MS, number=2, dtypes=BF16),
        ProfilerEvent("cudaLaunchKernel", 0, 1 * MS, number=3),
        ProfilerEvent("aten::copy_", 1 * MS, 2 * MS, number=4, dtypes=FP32, thread=2),
        ProfilerEvent("sm80_xmma_gemm_bf16", 5 * MS, 35 * MS, asked_by=2, on_device=True),
        ProfilerEvent("elementwise_kernel", 35 * MS, 45 * MS, asked_by=4, on_device=True),
    ]
    found = sum_profiler_events(events)
    assert found.shares["narrow"] == pytest.approx(0.30)
    assert found.shares["copies"] == pytest.approx(0.10)
    assert found.shares["host"] == pytest.approx(0.60)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (
            "convolution mkldnn_convolution convolution_backward cudnn_convolution slow_conv2d_forward",
            "fp32",
        ),
        ("mm addmm bmm baddbmm matmul linear mv addmv dot _scaled_mm _linear_pointwise linear_backward", "fp32"),
        ("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu_backward", "fp32"),
        ("lstm gru mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward", "fp32"),
        ("upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d _upsample_bilinear2d_aa", "other"),
        ("upsample_trilinear3d_backward native_layer_norm native_batch_norm_backward _softmax lgamma cummax", "other"),
        ("_convert_weight_to_int4pack sigmoid_backward max_pool2d_with_indices _thnn_fused_lstm_cell igamma", "other"),
    ],
)
def test_matrix_work_is_known_by_its_whole_name(names: str, part: str) -> None:
    for name in names.split():
        events = [ProfilerEvent(STEP, 0, MS, number=1), ProfilerEvent(f"aten::{name}", 0, MS, number=2, dtypes=FP32)]
        assert sum_profiler_events(events).shares[part] == pytest.approx(1.0), name


def test_without_events_everything_is_the_hosts() -> None:
    assert sum_profiler_events([]).shares["host"] == 1.0


def test_the_profiler_is_heard() -> None:
    model, given = nn.Linear(512, 512), torch.randn(512, 512)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(given).float().sum().backward()

    step()
    found = measure_step_kernels(step, CPU, steps=2)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["narrow"] > 0.05
    assert found.shares["fp32"] < 0.05
    wide = measure_step_kernels(lambda: model(given).sum().backward(), CPU, steps=2)
    assert wide.shares["narrow"] == 0.0
    assert wide.shares["fp32"] > 0.2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 12, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1))
        self.depthwise = nn.Conv2d(12, 12, 3, groups=12)
        self.even = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.depthwise(self.body(self.stem(images)))
        return self.head(found.mean((2, 3)))  # type: ignore[no-any-return]


def net() -> tuple[nn.Module, Any, Any]:
    return Net(), loss_fn, (torch.randn(2, 8, 10, 10), torch.randint(0, 10, (2,)))


def test_layers_with_odd_channels_are_found_by_name_with_their_work() -> None:
    arm = Candidate(build_case(*net()), StepSetting("bf16"), observe=False)
    looked = record_step_layers(arm.model, arm.step)
    groups = group_misaligned_layers(looked)
    assert [[layer.name for layer in layers] for layers, _ in groups] == [["body.0", "body.2"], ["stem"]]
    assert sum(share for _, share in groups) <= 1.0
    assert groups[0][1] > groups[1][1] > 0.05
    assert looked.work.by_format == {"bf16": sum(looked.flops.values())}
    assert looked.work.wide == {}
    assert find_layer_channels(arm.model.get_submodule("depthwise")) is None
    assert "even" not in {layer.name for layer in looked.layers}  # it did not run


def test_work_in_fp32_is_put_down_to_the_island_it_is_on() -> None:
    model, loss, batch = net()
    arm = Candidate(build_case(island(model, "body"), loss, batch), StepSetting("bf16"), observe=False)
    work = record_step_layers(arm.model, arm.step).work
    assert list(work.wide) == ["body"]
    assert work.islands == ("body",)
    assert work.wide["body"] == work.by_format["fp32"]
    assert 0.5 < work.wide_share < 1.0


@pytest.mark.parametrize(
    ("layer", "shape", "then"),
    [
        (nn.Linear(9, 30, bias=False), (4, 5, 9), (16, 32)),
        (nn.Conv2d(7, 9, 3, stride=2, padding=1, dilation=2), (2, 7, 12, 12), (8, 16)),
        (nn.ConvTranspose2d(7, 8, 2, stride=2, output_padding=1), (2, 7, 6, 6), (8, 8)),
        (nn.Conv1d(3, 5, 3), (2, 3, 12), (8, 8)),
    ],
)
def test_a_padded_layer_is_the_same_but_for_its_channels(
    layer: Any, shape: tuple[int, ...], then: tuple[int, int]
) -> None:
    wide = build_padded_layer(layer)
    assert type(wide) is type(layer)
    assert find_layer_channels(wide) == then
    assert (wide.bias is None) == (layer.bias is None)
    where = -1 if isinstance(layer, nn.Linear) else 1
    given = list(shape)
    given[where] = then[0]
    out, before = wide(torch.randn(given)).shape, layer(torch.randn(shape)).shape
    assert out[where] == then[1]
    assert [n for i, n in enumerate(out) if i != where % len(out)] == [
        n for i, n in enumerate(before) if i != where % len(before)
    ]


def test_padding_is_timed_on_what_came_into_the_layer() -> None:
    arm = Candidate(build_case(*net()), StepSetting("bf16"), observe=False)
    (layers, share), *_ = group_misaligned_layers(record_step_layers(arm.model, arm.step))
    found = measure_misaligned_layer(layers, share, resolve_precision_name("bf16"), CPU, seconds=0.05)
    assert found.names == ("body.0", "body.2")
    assert (found.channels, found.padded) == ("12->12", "16->16")
    assert found.seconds > 0 < found.padded_seconds
    assert 0 < found.low <= found.high


class Own(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        return given[..., :1] * self.weight[0, 0]


def test_layers_that_padding_cannot_be_compared_with_are_passed_over() -> None:
    assert find_layer_channels(Own(9, 9)) is None
    replaced = nn.Linear(9, 9)
    replaced.forward = lambda given: given  # type: ignore[method-assign]
    assert find_layer_channels(replaced) is None
    model, loss, batch = net()
    arm = Candidate(build_case(island(model, "body"), loss, batch), StepSetting("bf16"), observe=False)
    looked = record_step_layers(arm.model, arm.step)
    assert {"body.0", "body.2"} <= looked.wide
    assert [[layer.name for layer in layers] for layers, _ in group_misaligned_layers(looked, without=looked.wide)] == [
        ["stem"]
    ]


def test_a_padded_layer_computes_the_gradients_that_the_layer_computes() -> None:
    model, loss, batch = net()
    model.get_submodule("stem").weight.requires_grad_(False)  # type: ignore[union-attr]
    arm = Candidate(build_case(model, loss, batch), StepSetting("bf16"), observe=False)
    stem = next(layer for layer in record_step_layers(arm.model, arm.step).layers if layer.name == "stem")
    assert not stem.needs_gradient  # the first one
    wide = build_padded_layer(stem.module)
    assert [p.requires_grad for p in wide.parameters()] == [False, True]
    for parameter in stem.module.parameters():
        parameter.requires_grad_(False)
    assert measure_misaligned_layer([stem], 1.0, resolve_precision_name("bf16"), CPU, seconds=0.01).kind == "Conv2d"


def test_switches_that_make_fp32_faster_are_read() -> None:
    assert name_fp32_precision(CPU) == "ieee"
    with create_fp32_scope("tf32", CPU):
        assert name_fp32_precision(CPU) == "tf32"
    conv: Any = torch.backends.mkldnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "bf16"
        assert name_fp32_precision(CPU) == "bf16"
    finally:
        conv.fp32_precision = before
    assert name_fp32_precision(CPU) == "ieee"
    assert name_fp32_precision(torch.device("meta")) == "ieee"


def test_code_that_asks_for_nothing_is_profiled_in_what_suits_the_device() -> None:
    case = Subject("tests.support.cases:linear").open()
    assert ProfiledCase(case, "bfloat16").precision.name == "bf16"
    assert ProfiledCase(case, "fp32").precision.name == "fp32"
    assert ProfiledCase(case).precision.name in ("bf16", "fp16", "fp32")


def test_a_precision_that_a_run_would_refuse_is_described_and_not_timed() -> None:
    examined = ProfiledCase(Subject("tests.support.cases:linear").open(), "tf32")
    assert examined.facts.passed_over is True
    assert examined.facts.native is False
    assert "tf32" in examined.facts.why


def test_compilations_are_counted_step_by_step() -> None:
    calls = 0
    layer = nn.Linear(4, 4)

    @torch.compile(backend="eager", dynamic=False)
    def compiled(given: Tensor, number: int) -> Tensor:
        return layer(given) * number  # type: ignore[no-any-return]

    def always() -> None:
        nonlocal calls
        calls += 1
        compiled(torch.ones(2, 4), calls)

    found = measure_warm_up(always, Stopwatch(CPU), seconds=60)
    assert len(found.compiled) >= 4
    assert all(found.compiled[1:5])
    assert "number" in found.reason
    assert all(spent <= took for spent, took in zip(found.compiling, found.seconds, strict=True))
    torch._dynamo.reset()
    once = measure_warm_up(lambda: compiled(torch.ones(2, 4), 3), Stopwatch(CPU), seconds=60)
    assert once.compiled[0] > 0
    assert not any(once.compiled[1:])
    torch._dynamo.reset()
