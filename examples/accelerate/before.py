"""A classifier with accelerate, in bf16."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def images(many: int, seed: int) -> TensorDataset:
    """Bright bars on noise: the label is the bar's place."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (many,), generator=generator)
    pictures = torch.randn(many, 1, 16, 16, generator=generator)
    pictures[torch.arange(many), 0, labels + 3] += 2.0
    return TensorDataset(pictures, labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, labels = batch
    return nn.functional.cross_entropy(model(pictures).float(), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    set_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = DataLoader(images(64 * steps, seed=0), batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        pictures, labels = images(640, seed=1).tensors
        right = model(pictures).argmax(1) == labels
    accelerator.print(f"accuracy {float(right.float().mean()):.3f}")


if __name__ == "__main__":
    main()
