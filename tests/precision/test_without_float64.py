"""Apple's GPUs have no float64: nothing that runs on the device of the model may ask for it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep


class NoFloat64(TorchDispatchMode):
    """Refuses to make a float64 tensor, as torch does on MPS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("dtype") is torch.float64 or any(argument is torch.float64 for argument in args):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _as_on_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in list(sys.modules.items()):
        if name.startswith("halfstep.") and hasattr(module, "widest_dtype"):
            monkeypatch.setattr(module, "widest_dtype", lambda _device: torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 16-bit formats are slow on some CPUs, which is not the point here
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def a_step() -> object:
    model = net()
    average = halfstep.Ema(model, 0.99)
    optimizer = torch.optim.AdamW(model.parameters())
    stepper = halfstep.Stepper(model, optimizer, precision="bf16", clip_norm=1.0, ema=average)
    return [stepper.step(loss_fn, torch.randn(4, 8)).applied for _ in range(2)]


def a_counted_loss() -> object:
    model = net()
    stepper = halfstep.Stepper(model, torch.optim.AdamW(model.parameters()), precision="bf16")
    counted = lambda model, batch: halfstep.Counted(model(batch).float().square().sum(), torch.tensor(4))  # noqa: E731
    return stepper.step(counted, torch.randn(4, 8)).applied


def a_guard(batch: Tensor) -> object:
    model = net()
    stepper = halfstep.Stepper(model, torch.optim.AdamW(model.parameters()), precision="fp16")
    guardian = halfstep.Guardian(stepper, tell=lambda _told: None)
    guardian.step(loss_fn, torch.randn(4, 8))
    return guardian.step(loss_fn, batch).reason


class Steps(nn.Module):
    """A model of timesteps, with frequencies as a buffer."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 8)
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(64) / 64.0))

    def forward(self, times: Tensor) -> Tensor:
        narrow = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        return self.linear(times.to(narrow)[:, None]).float() * self.frequencies.to(narrow).mean()


NOT_A_NUMBER = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
NOT_A_NUMBER[1, 2] = torch.nan
HUGE = torch.full((4, 8), 1e30)

WORK: dict[str, Callable[[], object]] = {
    "step": a_step,
    "counted loss": a_counted_loss,
    "guard, NaN in the batch": lambda: a_guard(NOT_A_NUMBER.clone()),
    "guard, huge batch": lambda: a_guard(HUGE.clone()),
    "audit": lambda: halfstep.audit(net(), loss_fn, torch.randn(4, 8), precision="fp16"),
    "audit, timesteps": lambda: (
        halfstep.audit(Steps(), loss_fn, torch.arange(990, 1006).float(), precision="bf16").spotted
    ),
    "survival": lambda: halfstep.survival(net(), loss_fn, torch.randn(4, 8), format_name="fp16").verdict,
}


@pytest.mark.parametrize("name", WORK)
def test_it_runs_where_there_is_no_float64(name: str) -> None:
    with NoFloat64():
        assert WORK[name]() is not None


def test_the_mode_refuses_float64() -> None:
    with NoFloat64(), pytest.raises(TypeError, match="MPS"):
        torch.randn(2).double()
