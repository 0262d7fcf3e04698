"""Cases on fake tensors: built there, or converted, and never at the cost of the person's model."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from halfstep.measure.batches import count_samples, resize_batch
from halfstep.measure.candidate import measure_peak_bytes
from halfstep.measure.case import Case, build_case
from halfstep.measure.memory.fake_tensors import build_fake_case, create_fake_mode, move_fake_model
from halfstep.measure.memory.timeline import BACKWARD, Timeline, estimate_kernel_workspace
from halfstep.measure.subject import Subject
from halfstep.observe.recorder import Operation, Recorder
from tests.support.cases import loss_fn


class NeedsNumbers(nn.Module):
    """Reads a number while it is built, as a drop path's schedule does."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.layer.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))
        self.plain = torch.ones(7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.layer(x)) + self.table
        return out


def all_fake(model: nn.Module) -> bool:
    return all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))


def test_a_case_is_built_without_memory() -> None:
    mode = create_fake_mode()
    case = build_fake_case(Subject("tests.support.cases:convolutions").open, mode)
    assert all_fake(case.model)
    assert all(isinstance(tensor, FakeTensor) for tensor in case.batch)
    with mode:
        assert count_samples(resize_batch(case.batch, 1000)) == 1000


def test_a_model_that_needs_numbers_is_built_for_real_and_converted() -> None:
    made: list[Case] = []

    def make() -> Case:
        made.append(build_case(NeedsNumbers(), loss_fn, (torch.randn(2, 4), torch.zeros(2, dtype=torch.long))))
        return made[-1]

    case = build_fake_case(make, create_fake_mode())
    model, real = case.model, made[-1].model
    assert all_fake(model)
    assert isinstance(model, NeedsNumbers)
    assert isinstance(model.plain, FakeTensor)
    assert model.rates == [0.0, 0.25, 0.5]
    assert model.tied.weight is model.layer.weight
    assert model.layer.weight.requires_grad
    assert not model.layer.bias.requires_grad
    assert isinstance(model.layer.weight, nn.Parameter)
    assert model is not real
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*real.parameters(), *real.buffers()))


def test_a_converted_model_is_no_copy_and_has_no_gradients() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    case = build_fake_case(
        lambda: build_case(model, loss_fn, (torch.randn(2, 4), torch.zeros(2, dtype=torch.long))), create_fake_mode()
    )
    assert case.model.weight.grad is None
    assert torch.equal(model.weight.grad, torch.ones(4, 4))
    assert case.model is not model


def test_an_error_of_the_persons_own_is_theirs() -> None:
    def broken() -> Case:
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        build_fake_case(broken, create_fake_mode())


def test_placing_lays_kernels_out_and_keeps_ties() -> None:
    mode = create_fake_mode()
    with mode:
        model = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8))
        model[1].weight = model[0].weight
        move_fake_model(model, torch.device("cpu"), channels_last=True)
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.requires_grad


def test_a_timeline_knows_when_memory_comes_and_goes_and_keeps_none_alive() -> None:
    timeline = Timeline()
    with create_fake_mode(), Recorder(nn.Identity(), timeline):
        x = torch.empty(100)
        y = (x + 1).view(10, 10)  # a view is no memory
        del x
        z = y * 2
        y.mul_(3)
        del y
        timeline.begin(BACKWARD)
        torch.empty(0)
    assert [(block.bytes, block.part) for block in timeline.blocks] == [
        (400, "temporary"),
        (400, "temporary"),
        (400, "activations"),
        (0, "temporary"),
    ]
    first, second, third, _ = timeline.blocks
    assert first.died < third.born  # gone before z was made
    assert second.died < timeline.now
    assert third.died > timeline.now
    assert [block.format for block in timeline.saved_for_backward] == ["fp32"]
    del z
    assert third.died == timeline.now


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_layer_that_was_copied_while_built_shares_memory_with_its_views() -> None:
    """nn.TransformerEncoder copies its layer so; views of the weights would count as activations."""
    with create_fake_mode():
        layer = copy.deepcopy(nn.Linear(4, 4))
        move_fake_model(layer, torch.device("cpu"), channels_last=False)
        assert layer.weight.t().untyped_storage()._cdata == layer.weight.untyped_storage()._cdata
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad


CASES = [
    # format, by channels, image (how many, channels, size), channels out, kernel, stride
    (torch.float32, False, (2, 64, 32), 64, 3, 1),
    (torch.float32, False, (2, 64, 64), 64, 3, 2),
    (torch.float32, False, (2, 40, 64), 72, 3, 1),  # blocks that are not full
    (torch.float32, False, (2, 16, 64), 1, 3, 1),
    (torch.float32, False, (1, 512, 8), 512, 3, 1),
    (torch.float32, True, (1, 512, 8), 512, 3, 1),
    (torch.bfloat16, False, (1, 512, 8), 512, 3, 1),
    (torch.bfloat16, True, (1, 512, 8), 512, 3, 1),
]


@pytest.mark.parametrize(("dtype", "by_channels", "image", "out", "kernel", "stride"), CASES)
def test_what_convolutions_take_inside_is_what_the_allocator_saw(
    dtype: torch.dtype, by_channels: bool, image: tuple[int, int, int], out: int, kernel: int, stride: int
) -> None:
    count, channels, size = image
    layout = torch.channels_last if by_channels else torch.contiguous_format
    x = torch.randn(count, channels, size, size, dtype=dtype).contiguous(memory_format=layout)
    weight = torch.randn(out, channels, kernel, kernel, dtype=dtype).contiguous(memory_format=layout)
    rest = (None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    gradient = torch.randn_like(torch.ops.aten.convolution.default(x, weight, *rest))
    for function, given in (
        (torch.ops.aten.convolution.default, (x, weight, *rest)),
        (torch.ops.aten.convolution_backward.default, (gradient, x, weight, *rest, [True, True, False])),
    ):
        result = function(*given)
        real = measure_peak_bytes(partial(function, *given), torch.device("cpu"), [])
        made = sum(t.nbytes for t in (result if isinstance(result, tuple) else (result,)) if t is not None)
        predicted = made + estimate_kernel_workspace(Operation(function, given, {}, result, "", True, False))
        assert predicted == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("image", "weight", "groups", "layouts"),
    [
        ((4, 128, 8, 8), (256, 128, 2, 2), 1, (True, False, False)),  # only the image is laid out by channels
        ((4, 128, 8, 8), (256, 128, 2, 2), 1, (False, False, True)),  # only the gradient
        ((4, 192, 4, 4), (192, 1, 7, 7), 192, (True, False, True)),  # blocks for each group of one channel
        ((4, 64, 16, 16), (64, 1, 7, 7), 64, (False, False, False)),  # no copies for the weight's gradient
        ((8, 64, 1000), (64, 64, 9), 1, (False, False, False)),  # a line is an image of height 1
    ],
)
def test_layouts_groups_and_lines(
    dtype: torch.dtype,
    image: tuple[int, ...],
    weight: tuple[int, ...],
    groups: int,
    layouts: tuple[bool, bool, bool],
) -> None:
    def laid_out(shape: tuple[int, ...], by_channels: bool) -> Tensor:
        layout = torch.channels_last if by_channels else torch.contiguous_format
        return torch.randn(shape, dtype=dtype).contiguous(memory_format=layout)

    x, kernel = laid_out(image, layouts[0]), laid_out(weight, layouts[1])
    lines = len(image) - 2
    rest = (None, [1] * lines, [weight[-1] // 2] * lines, [1] * lines, False, [0] * lines, groups)
    gradient = laid_out(tuple(torch.ops.aten.convolution.default(x, kernel, *rest).shape), layouts[2])
    given = (gradient, x, kernel, *rest, [True, True, False])
    function = torch.ops.aten.convolution_backward.default
    result = function(*given)
    real = measure_peak_bytes(partial(function, *given), torch.device("cpu"), [])
    made = sum(tensor.nbytes for tensor in result if tensor is not None)
    predicted = made + estimate_kernel_workspace(Operation(function, given, {}, result, "", True, False))
    assert predicted == pytest.approx(real, rel=0.12)


def test_weights_from_a_file_are_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.ones(4, 4), "bias": torch.zeros(4)}, tmp_path / "weights.safetensors")

    def make() -> Case:
        model = nn.Linear(4, 4)
        model.load_state_dict(load_file(tmp_path / "weights.safetensors"))
        return build_case(model, lambda m, x: m(x).square().mean(), torch.randn(2, 4))

    case = build_fake_case(make, create_fake_mode())
    assert all(isinstance(tensor, FakeTensor) for tensor in case.model.parameters())
    assert "fake_tensor" not in caplog.text + "".join(capfd.readouterr())
