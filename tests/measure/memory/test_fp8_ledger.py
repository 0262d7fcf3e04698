"""Ledgers of fp8 models: the peak of a real run on a CPU, casts under their own name, and GPUs not verified."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.measure.case import build_case
from halfstep.measure.memory.devices import device_named
from halfstep.measure.memory.estimate import estimate, estimate_device_ledger
from halfstep.measure.setting import StepSetting
from halfstep.precision.names import FP8_KINDS
from halfstep.precision.precision import resolve_precision_name
from tests.support.peaks import peak_of_update

pytest.importorskip("torchao")

ROWS, WIDTH = 128, 256


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_the_ledger_is_within_three_percent_of_a_real_run(kind: str) -> None:
    batch = torch.randn(ROWS, WIDTH)
    found = estimate(net(), loss_fn, batch, precision=kind, optimizer=adam)
    model = net()
    resolve_precision_name(kind).prepare(model, torch.device("cpu"))
    real = peak_of_update(model, loss_fn, batch, adam(model), "bf16")
    assert found.peak == pytest.approx(real, rel=0.03)
    # Casts are neither weights nor buffers, of which this model has none.
    plain = estimate(net(), loss_fn, batch, precision="bf16", optimizer=adam)
    assert found.whole["buffers"] == 0
    assert {part: found.whole[part] for part in ("weights", "gradients", "optimizer", "batch")} == {
        part: plain.whole[part] for part in ("weights", "gradients", "optimizer", "batch")
    }
    assert found.whole["cast copies"] > 0
    assert not found.verified


@pytest.mark.parametrize("device", ["h100-80gb", "b200"])
def test_gpus_are_marked_as_not_verified(device: str) -> None:
    case = build_case(net(), loss_fn, torch.randn(ROWS, WIDTH))
    ledgers = [
        estimate_device_ledger(lambda: case, StepSetting(name), device_named(device)) for name in ("bf16", "fp8")
    ]
    plain, narrow = ledgers
    assert not narrow.verified
    assert not narrow.by_cpu_rules
    assert any("not verified on this device" in str(remark) for remark in narrow.remarks)
    # Weights, gradients and optimizer are those of bf16: fp8 saves none of them.
    assert narrow.whole["weights"] == plain.whole["weights"]
    assert narrow.peak > 0.8 * plain.peak
