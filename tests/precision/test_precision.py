"""Every precision in the folder keeps the same promises; torch's switches are as before after every scope."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.formats import FP16, FP32, TF32
from halfstep.precision.flags import create_fp32_scope, is_tf32_enabled, read_fp32_flags
from halfstep.precision.names import list_precision_names
from halfstep.precision.precision import disable_onednn_fp16_backward, resolve_precision_name
from tests.support.cpu import emulates_bf16

CPU = torch.device("cpu")
NAMES = list_precision_names()


def test_the_folder_is_not_empty() -> None:
    assert {"fp32", "tf32", "bf16", "fp16"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    precision = resolve_precision_name(name)
    assert precision.name == name == str(precision)
    assert precision.summary
    assert precision.stores is FP32
    assert precision.reduces is FP32
    assert precision.scaled == (precision.computes.largest < FP32.largest / 1e9)
    below = precision.falls_to
    seen = [name]
    while below is not None:
        assert below not in seen
        seen.append(below)
        below = resolve_precision_name(below).falls_to
    assert seen[-1] == "fp32"


@pytest.mark.parametrize("name", NAMES)
def test_autocast_is_round_the_forward_pass_and_reusable(name: str) -> None:
    precision = resolve_precision_name(name)
    scope = precision.autocast(CPU)
    linear = nn.Linear(4, 4)
    for _ in range(2):
        with scope:
            out = linear(torch.ones(1, 4))
        assert out.dtype is (precision.computes.dtype if precision.casts else torch.float32)
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_scopes_put_the_switches_back_also_after_an_error(name: str) -> None:
    before = read_fp32_flags()
    scope = resolve_precision_name(name).scope(CPU)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), scope:
            _ = 1 / 0
        assert read_fp32_flags() == before


def test_fp32_is_fp32_whatever_the_process_was_set_to() -> None:
    x = torch.randn(256, 256)
    exact = x.double() @ x.double()
    torch.set_float32_matmul_precision("medium")
    try:
        loose = ((x @ x) - exact).abs().max()
        with resolve_precision_name("fp32").scope(CPU):
            strict = ((x @ x) - exact).abs().max()
        assert torch.get_float32_matmul_precision() == "medium"
        assert strict < 1e-3
        # oneDNN takes the looser product only where it has instructions for it.
        if torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulates_bf16():
            assert loose > 10 * strict
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_cuda_switches_are_scoped_with_no_gpu_present() -> None:
    cuda = torch.device("cuda")
    before = read_fp32_flags()
    assert is_tf32_enabled(cuda), "cuDNN convolutions are tf32 unless told otherwise"
    with create_fp32_scope("ieee", cuda):
        assert not is_tf32_enabled(cuda)
        assert read_fp32_flags()["cudnn.conv"] == "ieee"
        with create_fp32_scope("tf32", cuda):
            assert read_fp32_flags()["cuda.matmul"] == read_fp32_flags()["cudnn.conv"] == "tf32"
        assert not is_tf32_enabled(cuda)
    assert read_fp32_flags() == before
    assert torch.backends.cudnn.allow_tf32 is True
    assert resolve_precision_name("tf32").computes is TF32


def test_half_convolutions_run_backward_without_onednn_and_products_with_it() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(2, 2, 3), nn.Linear(2, 2)

    model = Both()
    assert disable_onednn_fp16_backward(model) == disable_onednn_fp16_backward(model) == 1
    seen: dict[str, bool] = {}

    with resolve_precision_name("fp16").scope(CPU):
        with resolve_precision_name("fp16").autocast(CPU):
            hidden = model.conv(torch.randn(1, 2, 5, 5))
            out = model.linear(hidden.mean((2, 3)))
        assert len(model.conv._forward_hooks) == 1
        hidden.grad_fn.register_prehook(lambda _g: seen.update(conv=torch.backends.mkldnn.enabled))
        out.grad_fn.register_prehook(lambda _g: seen.update(linear=torch.backends.mkldnn.enabled))
        out.float().sum().backward()
    assert seen == {"conv": False, "linear": True}
    assert torch.backends.mkldnn.enabled
    assert model.conv.weight.grad is not None
    exact = nn.Conv2d(2, 2, 3)
    exact.load_state_dict(model.conv.state_dict())
    assert FP16.epsilon < 1e-2


def test_onednn_is_back_after_an_error_in_a_convolutions_backward() -> None:
    conv = nn.Conv2d(1, 1, 1)
    disable_onednn_fp16_backward(conv)

    def fail(_gradient: object) -> None:
        raise ZeroDivisionError

    conv.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError), resolve_precision_name("fp16").scope(CPU):  # noqa: PT012
        with resolve_precision_name("fp16").autocast(CPU):
            out = conv(torch.ones(1, 1, 2, 2))
        out.float().sum().backward()
    assert torch.backends.mkldnn.enabled
