"""A trainer of nnU-Net's shape in miniature: what `nnUNetTrainer` calls in `initialize`, `train_step` and each epoch.

    python examples/nnunet/before.py

nnU-Net itself brings some thirty packages, so this class stands in for it. One batch holds a NaN.
`after.py` is a trainer of your own on top of it, which is how nnU-Net is extended.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import PolynomialLR

EPOCHS, ITERATIONS, BAD = 2, 4, 5


class ToyTrainer:
    """The members of `nnUNetTrainer` that a step touches; on a CPU it has no scaler, as nnU-Net."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.grad_scaler = torch.amp.GradScaler("cuda") if device.type == "cuda" else None

    def initialize(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 2, 1)]
        self.network = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), 1e-2, momentum=0.99, nesterov=True)
        self.lr_scheduler = PolynomialLR(self.optimizer, EPOCHS)
        self.loss = nn.CrossEntropyLoss()

    def train_step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        data, target = batch["data"].to(self.device), batch["target"].to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            loss = self.loss(self.network(data), target)
        if self.grad_scaler is not None:
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.optimizer.step()
        return {"loss": loss.item()}

    def run_training(self) -> dict[str, object]:
        self.initialize()
        self.network.train()
        for epoch in range(EPOCHS):
            for batch in batches()[epoch * ITERATIONS :][:ITERATIONS]:
                self.train_step(batch)
            self.lr_scheduler.step()  # once an epoch, so that a skipped step has no part in it
        finite = all(bool(t.isfinite().all()) for t in self.network.state_dict().values())
        return {"finite": finite, "report": getattr(self.grad_scaler, "report", None)}


def batches() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(0)
    images = [torch.randn(2, 1, 16, 16, generator=made) for _ in range(EPOCHS * ITERATIONS)]
    images[BAD][0, 0, 0, 0] = float("nan")
    return [{"data": image, "target": (image[:, 0] > 0).long()} for image in images]


def main() -> dict[str, object]:
    return ToyTrainer(torch.device("cpu")).run_training()


if __name__ == "__main__":
    print(main())
