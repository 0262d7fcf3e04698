"""One audited batch on the CPU names both, with line and fix; with the fixes the same model trains, and fits a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p34_loss_that_only_cuda_refuses.plain import Classifier, Product, batch

IDS = ["function-mixes-formats", "loss-refused"]


class Mended(Product):
    """The function with the two decorators that the audit names."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


def run() -> Outcome:
    found = _found(Classifier(own_function=True), device=None)
    lines = all("plain.py:" in evidence for evidence in found.values())
    model = Classifier(own_function=True)
    model.product, model.loss = Mended.apply, halfstep.island(nn.BCELoss())
    plain = Classifier(own_function=False)
    plain.loss = halfstep.island(nn.BCELoss())
    left = _found(model, device=None) | _found(plain, device="a100-80gb")
    stepper = halfstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), precision=resolve_precision_name("bf16")
    )
    report = stepper.step(loss_fn, batch())
    return Outcome(
        good=sorted(found) == IDS and lines and not left and report.applied,
        seen=f"audit: {'; '.join(found.values())}; with the fixes: findings {sorted(left)}, applied: {report.applied}",
    )


def _found(model: Classifier, device: str | None) -> dict[str, str]:
    spotted = halfstep.audit(model, loss_fn, batch(), precision="bf16", device=device).spotted
    return {one.finding.id: one.finding.evidence for one in spotted if one.finding.id in IDS}


def loss_fn(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return model(*given)
