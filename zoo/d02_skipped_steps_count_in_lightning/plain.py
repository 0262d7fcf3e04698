"""Lightning's Trainer in fp16, asked for four updates; the first four batches overflow (fp16 on a CPU: README)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zoo.outcome import Outcome
from zoo.real_lightning import LightningModule, fit_in_fp16

UPDATES, OVERFLOWS = 4, 4
SCALE = 1024.0
Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    """Return some batches with targets beyond fp16's reach, and then as many usual ones as are needed."""
    x = torch.ones(8, 4)
    return [(x, torch.full((8, 1), 1e4))] * OVERFLOWS + [(x, torch.ones(8, 1))] * UPDATES


def model_and_schedule() -> tuple[nn.Linear, torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    return (model(x).float() - target).square().mean()


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self._optimizer, self._schedule = model_and_schedule()
        self.changes = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.before = self.model.weight.detach().clone()
        return loss_fn(self.model, batch)

    def on_train_batch_end(self, *_: object) -> None:
        self.changes += not torch.equal(self.before, self.model.weight)

    def configure_optimizers(self) -> dict[str, object]:
        return {"optimizer": self._optimizer, "lr_scheduler": {"scheduler": self._schedule, "interval": "step"}}


def run() -> Outcome:
    module = Regression()
    loader = DataLoader(batches(), batch_size=None)
    trainer = fit_in_fp16(module, loader, max_steps=UPDATES, init_scale=SCALE)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return judge(module.changes, counted=trainer.global_step, rate=rate)


def judge(changes: int, *, counted: int, rate: float) -> Outcome:
    return Outcome(
        good=changes == counted == UPDATES and rate == 1e-3 * 0.5**changes,
        seen=f"asked for {UPDATES} updates; the weights changed {changes} times, {counted} steps were counted, "
        f"and the learning rate went from 0.001 to {rate:g}",
        word="skips count as steps",
    )
