"""A model, a batch and a loss that several parts train: small, with convolutions, statistics and a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.random_state import use_seeded_generators

CLASSES = 4
Batch = tuple[Tensor, Tensor]


def build_convolutional_model(device: torch.device, *, width: int = 16) -> nn.Module:
    """Return the model, with the same weights every time."""
    with use_seeded_generators(0):
        model = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, CLASSES),
        )
    return model.to(device)


def create_image_batch(device: torch.device, *, samples: int = 8, size: int = 16, seed: int = 1) -> Batch:
    """Return images and their classes, drawn on the host so that they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, size, size, generator=generator)
    classes = torch.randint(0, CLASSES, (samples,), generator=generator)
    return images.to(device), classes.to(device)


def compute_classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])
