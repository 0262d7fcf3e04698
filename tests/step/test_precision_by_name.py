"""A precision given by name runs as named, or is refused; nothing else is taken in its place."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.adapters.hosted_step import check_adapter_options
from halfstep.errors import PrecisionRefused, WrongUse
from halfstep.precision import select
from tests.support.devices import named


@pytest.fixture
def _core_i7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "describe_device", lambda _: named("Core i7"))


def parts(**options: Any) -> halfstep.Stepper:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.usefixtures("_core_i7")
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_emulated_format_runs_and_is_called_slow(name: str, dtype: torch.dtype) -> None:
    stepper = parts(precision=name)
    seen: list[torch.dtype] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        seen.append(out.dtype)
        return out.float().square().mean()

    x = torch.randn(3, 4)
    before = stepper.model.weight.clone()
    assert stepper.step(loss_fn, x).applied
    assert seen == [dtype]
    assert not torch.equal(before, stepper.model.weight)
    assert [finding.id for finding in stepper.findings] == ["precision.slow"]


@pytest.mark.wording
@pytest.mark.usefixtures("_core_i7")
def test_what_cannot_run_as_named_is_refused() -> None:
    for name in ("tf32", "amp"):
        with pytest.raises(PrecisionRefused, match=f"{name} on Core i7 is refused") as refused:
            parts(precision=name)
        assert refused.value.allowed == "fp32 on this device"
    with pytest.raises(PrecisionRefused, match="K=4 and N=2"):
        parts(precision="fp8")  # it is emulated, and this layer has too few columns
    stepper = parts(precision="fp32")
    with pytest.raises(PrecisionRefused):
        stepper.change_precision("tf32")
    assert stepper.precision.name == "fp32"


@pytest.mark.usefixtures("_core_i7")
def test_a_fallback_is_asked_for() -> None:
    stepper = parts(precision=halfstep.choose_precision("bf16", fallback=True))
    assert stepper.precision.name == "fp32"
    assert [finding.id for finding in stepper.findings] == ["precision.substituted"]


@pytest.mark.wording
@pytest.mark.parametrize("value", [True, False])
def test_strict_says_what_to_type_instead(value: bool) -> None:
    with pytest.raises(WrongUse, match=f"Stepper with strict={value}") as refused:
        parts(precision="bf16", strict=value)
    assert "leave strict out" in refused.value.do
    with pytest.raises(WrongUse, match="leave strict out"):
        check_adapter_options({"strict": value})  # type: ignore[typeddict-unknown-key]


@pytest.mark.wording
@pytest.mark.usefixtures("_core_i7")
def test_a_grad_scaler_by_name() -> None:
    assert [finding.id for finding in halfstep.GradScaler("cpu", precision="bf16").findings] == ["precision.slow"]
    assert halfstep.GradScaler("cpu", precision="fp32").findings == ()
    assert halfstep.GradScaler("cpu", precision="bf16", enabled=False).findings == ()
    with pytest.raises(PrecisionRefused, match="tf32 on Core i7 is refused"):
        halfstep.GradScaler("cpu", precision="tf32")


@pytest.mark.wording
def test_a_grad_scaler_is_refused_where_fp16_is_known_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "describe_device", lambda _: named("NVIDIA GeForce GTX 1650"))
    monkeypatch.setattr("halfstep.precision.hardware.list_device_types", lambda: ["xpu", "cpu"])
    with pytest.raises(PrecisionRefused, match="known to be wrong"):
        halfstep.GradScaler("xpu")


def test_a_warning_shows_the_line_of_the_user() -> None:
    stepper = parts(precision="fp32")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.add_(1.0)).square().mean()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        stepper.step(loss_fn, torch.randn(3, 4))
    ((file, number),) = {(one.filename, one.lineno) for one in seen}
    assert (file, number) == (__file__, line)


def test_the_core_needs_no_numpy_and_says_nothing_about_it() -> None:
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "import halfstep, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision='fp32')\n"
        "print(stepper.step(lambda m, x: m(x).square().mean(), torch.ones(3, 2)).applied)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
