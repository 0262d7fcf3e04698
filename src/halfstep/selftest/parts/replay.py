"""A planted overflow, and the operation that the diagnosis of the failed step names."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from halfstep.guard.diagnosis.diagnoser import diagnose
from halfstep.guard.verdict import CODE, PRECISION, Cause, Verdict
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.random_state import use_seeded_generators
from halfstep.selftest.part import PartContext, PartResult, require
from halfstep.step.loss import StaticScale
from halfstep.step.report import LOSS_NOT_FINITE
from halfstep.step.stepper import Stepper

_PLACE = "middle.planted"


class _Overflow(nn.Module):
    """A product that fp32 holds and fp16 does not; what comes out is small again, so that an island fixes it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden + 2.0) * 6e4 / 6e4


class _Logarithm(nn.Module):
    """A logarithm of 0, which no format holds."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.log(hidden * 0.0)


class _PlantedBlock(nn.Module):
    """A block with the planted module inside, so that its path has two parts."""

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.before, self.planted = nn.Linear(16, 16), planted

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.planted(torch.tanh(self.before(hidden)))
        return found


class _Model(nn.Module):
    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), _PlantedBlock(planted), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.middle(self.first(inputs)))
        return hidden


def check(place: PartContext) -> PartResult:
    """Plant both, and compare what is named with what was planted."""
    overflow = _diagnose_planted(_Overflow(), resolve_precision_name("fp16"), place.device)
    _require_named(overflow, "aten.mul", PRECISION)
    islands = [remedy for remedy in overflow.remedies if remedy.kind == "island" and remedy.works]
    require(bool(islands), "no island was found that fixes an overflow of fp16")
    _require_named(_diagnose_planted(_Logarithm(), place.chosen(), place.device), "aten.log", CODE)
    figures = {"planted": 2, "place": _PLACE, "remedy": islands[0].target}
    return PartResult("2 of 2 named, and an island as the remedy", figures)


def _diagnose_planted(planted: nn.Module, precision: Precision, device: torch.device) -> Verdict:
    with use_seeded_generators(0):
        model = _Model(planted).to(device)
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    scale = StaticScale(1.0) if precision.scaled else None
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, loss_scale=scale)
    report = stepper.step(_loss, inputs)
    kind = type(planted).__name__.strip("_").lower()
    require(report.reason == LOSS_NOT_FINITE, f"a planted {kind} ended as {report.reason or 'applied'}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cost of the reruns
        return diagnose(stepper, report)


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).float().square().mean()
    return loss


def _require_named(verdict: Verdict, operation: str, cause: Cause) -> None:
    found = verdict.culprit
    where = f"{found.operation or found.outside} in {found.module or 'the model'}" if found else "nothing"
    right = found is not None and found.operation.startswith(operation) and found.module == _PLACE
    require(right, f"{operation} was planted in {_PLACE}, but {where} was named")
    require(verdict.cause == cause, f"{operation} in {_PLACE} was taken for {verdict.cause}, and it is {cause}")
