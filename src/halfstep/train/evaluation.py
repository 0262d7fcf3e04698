"""How good a model is: every sample once, without gradients, sums in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import world
from halfstep.precision.precision import Precision
from halfstep.train.data.source import Batch
from halfstep.train.task import Task

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Progress = Callable[[int, int], None]
"""Told how many batches are done, and of how many."""


def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    device: torch.device,
    progress: Progress = lambda done, of: None,
) -> dict[str, float]:
    """The loss and the task's metrics over all batches and all processes."""
    metrics = task.metrics().to(device)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    of = len(batches) if isinstance(batches, Sized) else 0
    training = model.training
    model.eval()
    try:
        with precision.inference(device):
            for done, batch in enumerate(batches, 1):
                total += _summed(task.loss(model, batch.tensors, metrics), len(batch.ids), total)
                progress(done, of)
    finally:
        model.train(training)
    loss, count = world.agree(total).tolist()
    return {"loss": loss / max(count, 1.0), **values(metrics)}


def values(metrics: MetricCollection) -> dict[str, float]:
    """What metrics come to over all processes; those of one number for each class are numbered."""
    with warnings.catch_warnings():
        # A process may have had no batch at all.
        warnings.filterwarnings("ignore", message="The ``compute`` method", category=UserWarning)
        computed = metrics.compute()
    found: dict[str, float] = {}
    for name, value in computed.items():
        numbers = value.tolist()
        if isinstance(numbers, list):
            found |= {f"{name}_{i}": number for i, number in enumerate(numbers)}
        else:
            found[name] = numbers
    return found


def _summed(loss: Any, samples: int, like: Tensor) -> Tensor:
    """A loss as sum and count."""
    if isinstance(loss, tuple):
        return torch.stack([torch.as_tensor(part, device=like.device).to(like.dtype) for part in loss])
    return torch.stack([loss.to(like.dtype) * samples, torch.full_like(like[0], samples)])
