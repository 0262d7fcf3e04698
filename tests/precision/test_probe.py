import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.errors import WrongUse
from halfstep.precision import flags, probe
from halfstep.precision.hardware import describe_device
from halfstep.precision.probe import (
    Measurements,
    build_cache_key,
    build_cache_path,
    measure_speedups,
    read_cached_measurements,
    write_cached_measurements,
)
from tests.support.cpu import emulates_bf16
from tests.support.devices import named


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small operation, three rounds."""
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    monkeypatch.setattr(probe, "OPERATIONS", {"GEMM": torch.nn.functional.linear})
    monkeypatch.setattr(probe, "_ON_CPU", {"GEMM": ((8, 8), (8, 8))})


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that is here and is said to have bf16, whatever the machine under the test has."""
    return replace(named("Xeon with AMX"), place="cpu")


def with_operation(monkeypatch: pytest.MonkeyPatch, operation: Any) -> None:
    monkeypatch.setattr(probe, "OPERATIONS", {"GEMM": operation})


def test_the_real_probe_is_quick_and_complete() -> None:
    measure_speedups("cpu", fresh=True)  # torch loads some of itself at the first backward
    # Processor time: the wall's says more about what else the machine is doing.
    start = time.process_time()
    found = measure_speedups("cpu", fresh=True)
    assert time.process_time() - start < (6.0 if emulates_bf16() else 1.5)
    for name in (name for name in found.speedups if name not in found.failures):
        assert set(found.speedups[name]) == {"GEMM", "conv2d", "conv3d"}
        assert found.combined(name) == pytest.approx(math.prod(found.speedups[name].values()) ** (1 / 3))
    assert found.combined("fp16") is None
    assert found.combined("fp8") is None


@pytest.mark.usefixtures("quick")
def test_the_backward_is_part_of_what_is_timed(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
            seen.append("forward")
            return torch.nn.functional.linear(values, weight)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            seen.append(f"backward {gradient.dtype}")
            return gradient, gradient

    with_operation(monkeypatch, Product.apply)
    measure_speedups(amx)
    assert seen.count("forward") == len(seen) / 2
    assert {"backward torch.float32", "backward torch.bfloat16", "backward torch.float16"} < set(seen)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("wrong", "words"), [(lambda out: out * 2, "is wrong: 3 away"), (lambda out: out * torch.nan, "is wrong: inf away")]
)
def test_a_format_with_other_numbers_than_fp32_is_no_candidate(
    monkeypatch: pytest.MonkeyPatch, amx: Any, wrong: Any, words: str
) -> None:
    def operation(values: Tensor, weight: Tensor) -> Tensor:
        out = torch.nn.functional.linear(values, weight)
        return wrong(out) if out.dtype is torch.bfloat16 else out

    with_operation(monkeypatch, operation)
    found = measure_speedups(amx, fresh=True)
    assert words in found.failures["bf16"]
    assert found.combined("bf16") is None


@pytest.mark.usefixtures("quick")
def test_the_surroundings_reach_neither_way(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    formats = []

    def linear(values: Tensor, weight: Tensor) -> Tensor:
        out = torch.nn.functional.linear(values, weight)
        formats.append(out.dtype)
        return out

    with_operation(monkeypatch, linear)
    random, switches = torch.random.get_rng_state(), flags.read_fp32_flags()
    matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    product = matrix @ matrix
    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure_speedups(amx)
    assert formats[0] is torch.float32
    assert torch.bfloat16 in formats
    assert set(found.speedups) == {"fp32", "bf16", "fp16"}
    assert torch.equal(random, torch.random.get_rng_state())
    assert switches == flags.read_fp32_flags()
    assert torch.equal(product, matrix @ matrix)


@pytest.mark.usefixtures("quick")
def test_it_runs_in_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    seen = set()

    def linear(values: Tensor, weight: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return torch.nn.functional.linear(values, weight)

    with_operation(monkeypatch, linear)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        measure_speedups(amx)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


@pytest.mark.usefixtures("quick")
def test_a_hopeless_format_is_not_timed_again(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    calls = []

    def linear(values: Tensor, weight: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16:
            calls.append(1)
            time.sleep(0.05)
        return torch.nn.functional.linear(values, weight)

    with_operation(monkeypatch, linear)
    found = measure_speedups(amx)
    assert len(calls) == 3
    assert found.combined("bf16") is not None
    assert found.combined("bf16") < 1 / probe.HOPELESS  # type: ignore[operator]


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_does_not_exist_fails_its_format_only(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    def linear(values: Tensor, weight: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16:
            raise RuntimeError("no engine for this\nand a trace")
        return torch.nn.functional.linear(values, weight)

    with_operation(monkeypatch, linear)
    found = measure_speedups(amx)
    assert found.failures == {"bf16": "GEMM failed: no engine for this"}
    assert found.combined("bf16") is None
    assert found.combined("fp16") is not None


@pytest.mark.usefixtures("quick")
def test_an_operation_without_an_fp32_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    def linear(values: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError("not on this backend")

    with_operation(monkeypatch, linear)
    found = measure_speedups(amx)
    assert found.combined("bf16") is None
    assert "not on this backend" in found.failures["fp32"]


@pytest.mark.usefixtures("quick")
def test_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, amx: Any) -> None:
    first = measure_speedups(amx)
    assert not first.cached
    again = measure_speedups(amx)
    assert again == replace(first, cached=True)
    measure_speedups(amx, fresh=True)
    assert read_cached_measurements(amx) != again


def entry(speedups: bytes, *, version: int) -> bytes:
    """A file that is right in all but one thing."""
    start = b'{"version": %d, "entries": {"KEY": {"speedups": ' % version
    return start + speedups + b', "failures": {}, "how": "", "seconds": 1}}}'


def test_a_right_file_is_read(amx: Any) -> None:
    build_cache_path().parent.mkdir(parents=True)
    build_cache_path().write_bytes(
        entry(b'{"bf16": {"GEMM": 2}}', version=1).replace(b"KEY", build_cache_key(amx).encode())
    )
    assert read_cached_measurements(amx) == Measurements({"bf16": {"GEMM": 2.0}}, {}, 1.0, cached=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        entry(b'{"bf16": {"GEMM": 2}}', version=99),
        b'{"version": 1, "entries": 3}',
        b'{"version": 1, "entries": {"KEY": null}}',
        b'{"version": 1, "entries": {"KEY": {"speedups": {"bf16": {"GEMM": 2}}}}}',
        entry(b'{"bf16": {"GEMM": "x"}}', version=1),
        entry(b'{"bf16": {"GEMM": -2}}', version=1),
        entry(b'{"bf16": {"GEMM": NaN}}', version=1),
        entry(b"[]", version=1),
    ],
)
def test_a_corrupt_or_foreign_cache_is_ignored_and_replaced(content: bytes, amx: Any) -> None:
    build_cache_path().parent.mkdir(parents=True)
    build_cache_path().write_bytes(content.replace(b"KEY", build_cache_key(amx).encode()))
    assert read_cached_measurements(amx) is None
    write_cached_measurements(amx, Measurements({"bf16": {"GEMM": 2.0}}, {}, 1.0))
    assert read_cached_measurements(amx) == Measurements({"bf16": {"GEMM": 2.0}}, {}, 1.0, cached=True)


def test_another_device_driver_or_torch_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = named("A100"), named("Xeon with AMX")
    keys = {
        build_cache_key(gpu),
        build_cache_key(replace(gpu, name="A30")),
        build_cache_key(replace(gpu, driver="600")),
        build_cache_key(replace(gpu, torch="9.9")),
        build_cache_key(cpu),
        build_cache_key(replace(cpu, isa=frozenset({"avx2"}))),
    }
    assert len(keys) == 6
    before = build_cache_key(cpu)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert build_cache_key(cpu) != before
    assert build_cache_key(gpu) in keys


def test_entries_of_other_devices_are_kept(amx: Any) -> None:
    one = Measurements({"bf16": {"GEMM": 2.0}}, {}, 1.0)
    write_cached_measurements(named("A100"), one)
    write_cached_measurements(amx, one)
    assert read_cached_measurements(named("A100")) == read_cached_measurements(amx) == replace(one, cached=True)
    assert len(json.loads(build_cache_path().read_text())["entries"]) == 2


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, amx: Any
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not measure_speedups(amx).cached
    assert not measure_speedups(amx).cached


@pytest.mark.wording
def test_a_description_cannot_be_measured() -> None:
    with pytest.raises(WrongUse, match="A100"):
        measure_speedups(named("A100"))


def test_a_device_without_candidates_measures_nothing() -> None:
    other = describe_device("mtia")
    assert measure_speedups(other).combined("bf16") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_the_real_probe_on_an_accelerator() -> None:
    found = measure_speedups(fresh=True)
    assert found.seconds < 10
    assert any(found.combined(name) for name in found.speedups)
