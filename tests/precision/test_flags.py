"""Process-wide switches: both of torch's interfaces agree inside a scope, and stand exactly as before after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from halfstep.precision import flags
from halfstep.precision.flags import create_fp32_scope
from halfstep.precision.hardware import Device, find_format_support
from halfstep.precision.island import island
from halfstep.precision.precision import disable_onednn_fp16_backward, resolve_precision_name

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
KEYS = [(b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")] + [("generic", "all")]


def _set(backend: str, operation: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, value)


def everything() -> dict[str, Any]:
    state: dict[str, Any] = {f"{b}.{o}": torch._C._get_fp32_precision_getter(b, o) for b, o in KEYS}
    for name in ("_get_cudnn_allow_tf32", "_get_cublas_allow_tf32", "_get_float32_matmul_precision"):
        try:
            state[name] = getattr(torch._C, name)()
        except RuntimeError:
            state[name] = "contradiction"
    return state


@pytest.fixture(autouse=True)
def _as_torch_begins() -> Iterator[None]:
    before = flags.save_flags()
    generic = torch._C._get_fp32_precision_getter("generic", "all")
    yield
    _set("generic", "all", generic)
    before.put_back()


SETTINGS: dict[str, Callable[[], object]] = {
    "torch's defaults": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn off": lambda: torch._C._set_cudnn_allow_tf32(False),
    "the old way": lambda: torch._C._set_cublas_allow_tf32(True),
    "the new way": lambda: _set("cuda", "matmul", "tf32"),
    "the new way, half": lambda: _set("cuda", "conv", "ieee"),
    "for all of cuda": lambda: (_set("cuda", "all", "tf32"), _set("cuda", "conv", "none")),
    "for everything": lambda: (_set("generic", "all", "tf32"), _set("cuda", "rnn", "none")),
}


@pytest.mark.parametrize("mode", ["ieee", "tf32"])
@pytest.mark.parametrize("device", [CUDA, CPU])
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_scope_leaves_everything_as_it_was_also_after_an_error(setting: str, device: torch.device, mode: Any) -> None:
    SETTINGS[setting]()
    before, as_set = everything(), flags.save_flags()
    scope = create_fp32_scope(mode, device)
    backend = "cuda" if device is CUDA else "mkldnn"
    with pytest.raises(ZeroDivisionError), scope, scope:
        _ = 1 // 0
    with scope:
        assert torch._C._get_fp32_precision_getter(backend, "conv") in (mode, "none")
    assert everything() == before
    # What follows a switch above it still does so.
    assert flags.save_flags() == as_set


@pytest.mark.parametrize("name", ["fp32", "bf16", "tf32"])
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_cudnn_flags_work_inside_a_step(setting: str, name: str) -> None:
    SETTINGS[setting]()
    with resolve_precision_name(name).scope(CUDA):
        wanted = name == "tf32"
        assert torch.backends.cudnn.allow_tf32 is wanted
        with torch.backends.cudnn.flags(enabled=False):
            pass
        assert torch._C._get_fp32_precision_getter("cuda", "conv") != ("ieee" if wanted else "tf32")
        torch._C._get_cublas_allow_tf32()
        torch.get_float32_matmul_precision()


def test_compiled_code_runs_inside_a_scope_of_a_gpu() -> None:
    torch._dynamo.reset()
    torch.set_float32_matmul_precision("high")
    compiled: Any = torch.compile(nn.Linear(8, 8), backend="eager")
    for _ in range(2):
        with resolve_precision_name("bf16").scope(CUDA):
            compiled(torch.randn(4, 8)).sum().backward()
    assert torch.get_float32_matmul_precision() == "high"
    torch._dynamo.reset()


def test_a_scope_that_changes_nothing_touches_nothing() -> None:
    before = flags.save_flags()
    with create_fp32_scope("ieee", CPU):
        assert flags.save_flags() == before


# -- oneDNN --------------------------------------------------------------------------------------------------------


def test_steps_in_several_threads_leave_onednn_as_it_was() -> None:
    precision = resolve_precision_name("fp16")
    barrier, failed = threading.Barrier(2), []

    def run(seed: int) -> None:
        try:
            model = nn.Conv2d(2, 2, 3)
            disable_onednn_fp16_backward(model)
            x = torch.randn(1, 2, 6, 6)
            for _ in range(20):
                barrier.wait()
                with precision.scope(CPU):
                    with precision.autocast(CPU):
                        out = model(x).sum()
                    out.backward()
        except Exception as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torch.backends.mkldnn.enabled


def test_overlapping_scopes_put_onednn_back_when_the_last_one_closes() -> None:
    first, second = (resolve_precision_name("fp16").scope(CPU) for _ in range(2))
    first.__enter__()
    torch.backends.mkldnn.enabled = False  # as while a convolution's backward runs
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.backends.mkldnn.enabled


# -- compiled backwards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_backward_of_a_compiled_island_is_in_fp32(name: str) -> None:
    precision = resolve_precision_name(name)

    def gradient(compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = island(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), "2")
        run: Any = torch.compile(lambda x: model(x), backend="aot_eager") if compiled else model
        with precision.scope(CPU):
            with precision.autocast(CPU):
                out = run(torch.randn(4096, 8))
            # The sum over the rows is beyond fp16's largest number.
            (out.float() * 1000).sum().backward()
        return cast("torch.Tensor", model[2].weight.grad)

    torch._dynamo.reset()
    expected, found = gradient(False), gradient(True)
    assert expected.abs().max() > torch.finfo(torch.float16).max
    assert torch.equal(found, expected)
    torch._dynamo.reset()


def test_overlapping_scopes_put_the_autocast_of_backwards_back_when_the_last_one_closes() -> None:
    torch.compile(nn.Linear(2, 2), backend="eager")
    config: Any = torch._functorch.config
    before, (first, second) = (
        config.backward_pass_autocast,
        (resolve_precision_name("bf16").scope(CPU) for _ in range(2)),
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.backward_pass_autocast == "off"
    second.__exit__(None, None, None)
    assert config.backward_pass_autocast == before
    with pytest.raises(KeyError), resolve_precision_name("fp16").scope(CPU):
        raise KeyError
    assert config.backward_pass_autocast == before
    with resolve_precision_name("fp32").scope(CPU):
        assert config.backward_pass_autocast == before


# -- small Turing chips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1660 Ti", "NVIDIA GeForce GTX 1650", "NVIDIA T1000"])
def test_small_turing_chips_have_no_tensor_cores(name: str) -> None:
    found = find_format_support(Device(kind="cuda", name=name, capability=(7, 5)), "fp16")
    assert not found.native
    assert not found.emulated
    assert "without tensor cores" in found.reason


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "Quadro RTX 6000", "NVIDIA TITAN RTX"])
def test_large_turing_chips_have_them(name: str) -> None:
    found = find_format_support(Device(kind="cuda", name=name, capability=(7, 5)), "fp16")
    assert "tensor cores" in found.reason
    assert "without" not in found.reason


def test_intel_gpus_follow_onednns_own_switch() -> None:
    now = {"allow": True}
    xpu = torch.device("xpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.xpu, "_is_compiled", lambda: True)
        patched.setattr(torch._C, "_get_onednn_allow_tf32", lambda: now["allow"])
        patched.setattr(torch._C, "_set_onednn_allow_tf32", lambda allowed: now.update(allow=allowed))
        assert flags.is_tf32_enabled(xpu), "as the user set it"
        assert flags.read_fp32_flags()["onednn.allow_tf32"] == "tf32"
        with create_fp32_scope("ieee", xpu):
            assert (now["allow"], flags.is_tf32_enabled(xpu)) == (False, False)
        assert now["allow"]
        now["allow"] = False
        with create_fp32_scope("tf32", xpu):
            assert (now["allow"], flags.is_tf32_enabled(xpu)) == (True, True)
        assert not now["allow"]


def test_sums_in_16_bits_are_reported() -> None:
    assert flags.read_fp32_flags()["fp16_accumulation"] == "False"
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        assert "fp16" not in flags.read_fp32_flags()["reduced_sums"]
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before
