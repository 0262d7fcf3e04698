"""A classifier in Lightning, in bf16."""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.LazyLinear(10),
        )
        self.net(torch.zeros(2, 1, 16, 16))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images).float(), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = self.net(images).argmax(1) == labels
        self.log("accuracy", right.float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def images(many: int, seed: int) -> TensorDataset:
    """Bright bars on noise: the label is the bar's place."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (many,), generator=generator)
    pictures = torch.randn(many, 1, 16, 16, generator=generator)
    pictures[torch.arange(many), 0, labels + 3] += 2.0
    return TensorDataset(pictures, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    pl.seed_everything(0)
    train = DataLoader(images(32 * steps, seed=0), batch_size=32, shuffle=True)
    trainer = pl.Trainer(
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(steps), train, DataLoader(images(640, seed=1), batch_size=64))
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
