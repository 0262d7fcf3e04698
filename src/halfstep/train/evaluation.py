"""How good a model is: every sample once, without gradients, sums in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import world
from halfstep.precision.precision import Precision, widen
from halfstep.train.data.source import Batch, Replaced
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
    left_out: Callable[[Sequence[Replaced]], None] = lambda samples: None,
) -> dict[str, float]:
    """The loss and the task's metrics over all batches and all processes; `left_out` hears of unreadable samples."""
    metrics = task.metrics().to(device)
    sums: list[Tensor] = []
    of = len(batches) if isinstance(batches, Sized) else 0
    training = model.training
    model.eval()
    try:
        with precision.inference(device):
            for done, batch in enumerate(batches, 1):
                sums.append(_summed(task.loss(model, batch.tensors, metrics), len(batch.ids)))
                left_out(batch.replaced)
                progress(done, of)
    finally:
        model.train(training)
    loss, count = world.agree(_total(sums)).tolist()
    return {"loss": loss / max(count, 1.0), **values(metrics)}


def values(metrics: MetricCollection) -> dict[str, float]:
    """What metrics come to over all processes; those of one number for each class are numbered."""
    with warnings.catch_warnings():
        # A process may have had no batch at all.
        warnings.filterwarnings("ignore", message="The ``compute`` method", category=UserWarning)
        computed = metrics.compute()
    found: dict[str, float] = {}
    for name, value in computed.items():
        _add(found, name, value.tolist())
    return found


def _add(found: dict[str, float], name: str, numbers: Any) -> None:
    if isinstance(numbers, list):
        for place, number in enumerate(numbers):
            _add(found, f"{name}_{place}", number)
    else:
        found[name] = float(numbers)


def _summed(loss: Any, samples: int) -> Tensor:
    """A loss as sum and count, where it is: nothing waits for the device here."""
    total, count = loss if isinstance(loss, tuple) else (loss * samples, samples)
    total = widen(torch.as_tensor(total))
    return torch.stack([total, torch.as_tensor(count).to(total)])


def _total(sums: list[Tensor]) -> Tensor:
    """Added up in float64, in the main memory: not every device has it."""
    return torch.stack(sums).cpu().to(torch.float64).sum(0) if sums else torch.zeros(2, dtype=torch.float64)
