"""Steps of a model over two devices, of one type and of two: `python -m tests.step.two_devices FOLDER`.

Prints one JSON object for each situation; FOLDER takes the compiled device.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import halfstep
from tests.support import twin_device

STEPS, BAD = 5, 2
SITUATIONS = [
    (precision, places)
    for precision, several in (
        ("fp32", [("cpu", "twin:0"), ("twin:0", "cpu"), ("twin:0", "twin:1")]),
        ("bf16", [("twin:0", "twin:1")]),
        ("fp16", [("twin:0", "twin:1")]),
    )
    for places in several
]


class OverTwo(nn.Module):
    """Layers with BatchNorm on each of two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.first.to(first)
        self.second.to(second)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x.to(self.first[0].weight.device))
        result: Tensor = self.second(hidden.to(self.second[0].weight.device))
        return result


@dataclasses.dataclass(frozen=True)
class Outcome:
    precision: str
    places: tuple[str, str]
    held: list[str]
    applied: list[bool]
    losses: list[float]
    norms: list[float]
    bad_step_moved: list[str]
    furthest_from_one_device: float


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of weights, buffers and optimizer state on the CPU."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[parameter]}.{key}": value.cpu().clone() for key, value in state.items()}
    return found


def trained(precision: str, places: tuple[str, str]) -> tuple[Outcome, dict[str, Tensor]]:
    """Take steps with a NaN among the samples of one of them."""
    model = OverTwo(*places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scale = halfstep.DynamicScale() if precision == "fp16" else None
    stepper = halfstep.Stepper(model, optimizer, precision=precision, clip_norm=0.1, loss_scale=scale)
    draw, reports, moved = torch.Generator().manual_seed(1), [], []
    for number in range(STEPS):
        x = torch.randn(16, 4, generator=draw)
        x[0, 0] = float("nan") if number == BAD else x[0, 0]
        before = tensors(model, optimizer)
        reports.append(stepper.step(lambda model, x: model(x).float().square().mean(), x))
        if number == BAD:
            after = tensors(model, optimizer)
            moved = [name for name in after if not torch.equal(before[name], after[name])]
    outcome = Outcome(
        precision=precision,
        places=places,
        held=[str(parameter.device) for parameter in model.parameters()],
        applied=[report.applied for report in reports],
        losses=[report.loss for report in reports],
        norms=[report.grad_norm for report in reports],
        bad_step_moved=moved,
        furthest_from_one_device=0.0,
    )
    return outcome, tensors(model, optimizer)


if __name__ == "__main__":
    twin_device.load(Path(sys.argv[1]))
    for precision, places in SITUATIONS:
        _, one = trained(precision, ("twin:0", "twin:0") if precision != "fp32" else ("cpu", "cpu"))
        outcome, two = trained(precision, places)
        furthest = max(float((one[name].double() - two[name].double()).abs().max()) for name in one)
        print(json.dumps(dataclasses.asdict(dataclasses.replace(outcome, furthest_from_one_device=furthest))))
