"""The loss scale of fp16: it cancels out in the update, falls on an overflow and rises again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.precision.precision import resolve_precision_name
from halfstep.random_state import use_seeded_generators
from halfstep.selftest.part import PartContext, PartFailed, PartResult, require
from halfstep.step.loss import DynamicScale, LossScale, StaticScale
from halfstep.step.report import GRADIENT_OVERFLOW
from halfstep.step.stepper import Stepper

_TOLERANCE = 0.02
"""Relative to the norm of fp32's update; fp16 alone comes to about 0.001."""
_ATTEMPTS = 30


class _ScaledTraining:
    """A linear model in fp16: on a CPU a convolution's backward has no kernel of this format."""

    def __init__(self, device: torch.device, scale: LossScale) -> None:
        self.model, self.batch = _model(device), _batch(device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.stepper = Stepper(self.model, optimizer, precision=resolve_precision_name("fp16"), loss_scale=scale)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten().cpu() for p in self.model.parameters()])


def check(place: PartContext) -> PartResult:
    """Compare one update with fp32's, then follow a dynamic scale through an overflow."""
    error = _measure_update_error(place.device)
    require(error <= _TOLERANCE, f"an update in fp16 differs from fp32's by {error:.1%} of its norm")
    falls = _follow_scale(place.device)
    figures = {"update_error": error, "falls": falls}
    return PartResult(f"update {error:.2%} off fp32's, {falls} halvings", figures)


def _measure_update_error(device: torch.device) -> float:
    """Return the distance of fp16's update from the one of a plain loop in fp32, relative to its norm."""
    plain, data = _model(device), _batch(device)
    _loss(plain, data).backward()
    wanted = -torch.cat([p.grad.flatten().cpu() for p in plain.parameters() if p.grad is not None])
    scaled = _ScaledTraining(device, StaticScale(2.0**10))
    before = scaled.weights()
    report = scaled.stepper.step(_loss, scaled.batch)
    require(report.applied, f"a step with a loss scale of 1024 was skipped: {report.reason}")
    return float((scaled.weights() - before - wanted).norm() / wanted.norm())


def _follow_scale(device: torch.device) -> int:
    """Follow a scale that begins too high; return how often it fell before the first update."""
    scaled = _ScaledTraining(device, DynamicScale(init_scale=2.0**24, growth_interval=2))
    before, last, falls = scaled.weights(), 2.0**24, 0
    while not (report := scaled.stepper.step(_loss, scaled.batch)).applied:
        require(report.reason == GRADIENT_OVERFLOW, f"a loss scale of {last:.0f} ended as {report.reason}")
        require(torch.equal(scaled.weights(), before), "an overflow moved the weights")
        require(report.loss_scale == last, f"the loss scale was {report.loss_scale:.0f} instead of {last:.0f}")
        falls, last = falls + 1, last / 2
        if falls == _ATTEMPTS:
            raise PartFailed(f"gradients overflow at every loss scale down to {last:g}")
    require(falls > 0, "a loss scale of 2**24 did not overflow fp16")
    require(not torch.equal(scaled.weights(), before), "an applied step did not change the weights")
    scaled.stepper.step(_loss, scaled.batch)
    risen = scaled.stepper.step(_loss, scaled.batch).loss_scale
    require(risen == 2 * last, f"two clean steps took the loss scale from {last:.0f} to {risen:.0f}, not to its double")
    return falls


def _model(device: torch.device) -> nn.Module:
    with use_seeded_generators(0):
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model.to(device)


def _batch(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(32, width, generator=generator) for width in (16, 4))
    return inputs.to(device), targets.to(device)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]).float(), batch[1])
