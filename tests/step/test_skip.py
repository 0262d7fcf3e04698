"""A skipped step did not happen: in every precision, with every optimizer, for every cause, at any time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Ema, Stepper, Window
from halfstep.precision.precision import PRECISIONS, resolve_precision_name
from halfstep.step.storage.weight_format import can_take_bf16_weights
from tests.support.combinations import pairwise
from tests.support.digest import digest_of_run
from tests.support.models import buffered_model

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd_momentum_fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}
FAULTS = ("nan_loss", "inf_in_one_gradient", "nan_in_one_gradient_element", "overflow_in_the_forward")


class Fault:
    """Spoils one micro-batch in a chosen way; off until armed."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.kind, self.armed = kind, False
        model[4].weight.register_hook(self._gradient)

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, 8), torch.randint(0, 4, (6,))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        if self.armed and self.kind == "overflow_in_the_forward":
            out = (out * 1e25) * 1e25
        out = out.float()
        loss = F.cross_entropy(out, batch[1]) + (out * out * 1e-3).mean()
        return loss * float("nan") if self.armed and self.kind == "nan_loss" else loss

    def _gradient(self, gradient: Tensor) -> Tensor:
        if not self.armed or not self.kind.endswith(("gradient", "element")):
            return gradient
        spoiled = gradient.clone()
        if self.kind == "inf_in_one_gradient":
            spoiled.fill_(float("inf"))
        else:
            spoiled[1, 3] = float("nan")
        return spoiled


def expected_reason(kind: str, precision: str) -> str:
    if kind in ("nan_loss", "overflow_in_the_forward"):
        return "loss_not_finite"
    return "gradient_overflow" if precision == "fp16" else "gradient_not_finite"


@pytest.mark.parametrize(
    *pairwise(
        precision=["fp32", "bf16", "fp16"], optimizer=OPTIMIZERS, kind=FAULTS, microbatches=[1, 4], clean_steps=[9, 0]
    )
)
def test_nothing_moves(precision: str, optimizer: str, kind: str, microbatches: int, clean_steps: int) -> None:
    model = buffered_model()
    fault = Fault(kind, model)
    opt = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    stepper = Stepper(
        model, opt, precision=resolve_precision_name(precision), clip_norm=1.0, schedule=schedule, ema=Ema(model, 0.9)
    )

    def window() -> Window:
        return Window(fault.batch() for _ in range(microbatches))

    for _ in range(clean_steps):
        assert stepper.step(fault.loss, window()).applied
    before = digest_of_run(stepper)

    # Only the last micro-batch is spoiled: the others have already moved the buffers.
    batches = window()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        fault.armed = batch is batches[-1]
        return fault.loss(model, batch)

    report = stepper.step(loss, batches)
    fault.armed = False

    assert not report.applied
    assert not report.finite
    assert report.reason == expected_reason(kind, precision)
    assert digest_of_run(stepper) == before
    assert (stepper.counts.attempted, stepper.counts.applied) == (clean_steps + 1, clean_steps)
    assert all(p.grad is None for p in model.parameters())

    assert stepper.step(fault.loss, window()).applied
    assert digest_of_run(stepper) != before
    assert all(torch.isfinite(p).all() for p in model.parameters())


# -- weights and states in fewer bits -----------------------------------------------------------------------------

NARROW = [name for name in PRECISIONS if name.startswith(("fp8", "mxfp8"))]
"""Precisions that convert linear layers: here the last one, of 512 to 32."""
WEIGHTS = ["fp32", "bf16-split", "bf16-stochastic"]
STATES = ["fp32", "int8", "fp8"]
IN_CI = {("fp32", 1), ("bf16", 1), ("bf16", 3), ("fp8", 1)}
CELLS = [
    pytest.param(*cell, many, marks=[] if (cell[0], many) in IN_CI else [pytest.mark.full])
    for cell in product(["fp32", "bf16", *NARROW], WEIGHTS, STATES)
    if cell[1] == "fp32" or can_take_bf16_weights(PRECISIONS[cell[0]])
    for many in (1, 3)
]


def narrow_stepper(precision: str, weights: str, states: str) -> tuple[Stepper, Fault]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 32))
    fault = Fault("nan_in_one_gradient_element", model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    if states != "fp32" or precision in NARROW:
        pytest.importorskip("torchao")
    if states != "fp32":
        from halfstep.step.small_optimizers import build_low_bit_adam, group_low_bit_parameters

        optimizer = build_low_bit_adam(
            "adamw", states, group_low_bit_parameters(model, list(model.parameters())), lr=1e-2
        )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    stepper = Stepper(
        model,
        optimizer,
        precision=resolve_precision_name(precision),
        weight_format=weights,
        clip_norm=1.0,
        schedule=schedule,
        ema=Ema(model, 0.9),
    )
    return stepper, fault


@pytest.mark.parametrize(("precision", "weights", "states", "microbatches"), CELLS)
def test_nothing_moves_in_narrow_formats(precision: str, weights: str, states: str, microbatches: int) -> None:
    stepper, fault = narrow_stepper(precision, weights, states)

    def window() -> Window:
        return Window((torch.randn(32, 16), torch.randint(0, 32, (32,))) for _ in range(microbatches))

    for clean_steps in (0, 3):
        for _ in range(clean_steps):
            assert stepper.step(fault.loss, window()).applied
        before = digest_of_run(stepper)
        batches = window()

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor], last: Any = batches[-1]) -> Tensor:
            fault.armed = batch is last
            return fault.loss(model, batch)

        report = stepper.step(loss, batches)
        fault.armed = False
        assert report.reason == "gradient_not_finite"
        assert digest_of_run(stepper) == before
        assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.step(fault.loss, window()).applied
    assert digest_of_run(stepper) != before
    kinds = {type(value).__name__ for kept in stepper.optimizers["loss"].state.values() for value in kept.values()}
    assert kinds == {"Tensor"} | {"int8": {"OptimState8bit"}, "fp8": {"OptimStateFp8"}}.get(states, set())
    assert (stepper.weights is not None) == (weights != "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_buffers_that_changed_are_written_back(precision: str) -> None:
    model = buffered_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name(precision))
    constant, rebound, mean = model[2].constant, model[2].rebound, model[1].running_mean
    version = constant._version
    report = stepper.step(lambda m, x: m(x).sum() * float("inf"), torch.randn(6, 8))
    assert report.reason == "loss_not_finite"
    assert model[2].constant is constant
    assert constant._version == version
    assert model[2].rebound is rebound
    assert model[1].running_mean is mean
    assert model[2].last is None
    assert model[2].calls.item() == 0


def test_a_buffer_registered_during_a_skipped_window_is_gone_after_it() -> None:
    model = buffered_model()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        m.register_buffer("new", torch.ones(3))
        return m(x).sum() * float("nan")

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    stepper.step(loss, torch.randn(6, 8))
    assert "new" not in dict(model.named_buffers())


def test_scale_and_tracker_move_on_overflow_and_hold_on_a_bad_loss() -> None:
    model = buffered_model()
    fault = Fault("inf_in_one_gradient", model)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16")

    def scale() -> tuple[float, int]:
        state = stepper.state_dict()["losses"]["loss"]["loss_scale"]
        return state["scale"], state["_growth_tracker"]

    stepper.step(fault.loss, fault.batch())
    assert scale() == (65536.0, 1)
    stepper.step(lambda m, b: fault.loss(m, b) * float("nan"), fault.batch())
    assert scale() == (65536.0, 1)
    fault.armed = True
    report = stepper.step(fault.loss, fault.batch())
    assert (report.reason, report.loss_scale) == ("gradient_overflow", 65536.0)
    assert scale() == (32768.0, 0)


def test_at_the_floor_an_overflow_is_not_blamed_on_the_scale() -> None:
    model = buffered_model()
    fault = Fault("inf_in_one_gradient", model)
    fault.armed = True
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16")
    reasons = [stepper.step(fault.loss, fault.batch()).reason for _ in range(18)]
    assert reasons == ["gradient_overflow"] * 16 + ["gradient_not_finite"] * 2
    assert stepper.state_dict()["losses"]["loss"]["loss_scale"]["scale"] == 1.0


def test_a_gradient_too_large_for_a_norm_is_not_applied() -> None:
    model = nn.Linear(4, 1, bias=False)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", clip_norm=1.0)
    before = digest_of_run(stepper)
    report = stepper.step(lambda m, x: m(x).sum(), torch.full((1, 4), 1e30))
    assert report.reason == "gradient_not_finite"
    assert digest_of_run(stepper) == before
