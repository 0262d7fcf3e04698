"""Metrics as sums that are updated on the device of their tensors, without synchronizing.

A task may return a MetricCollection of torchmetrics instead. This module does not import it: that takes seconds.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import distributed
from halfstep.formats import widest_dtype
from halfstep.precision.precision import widen


class Metric(ABC):
    """One metric. Its sums are passed as zeros, int64 or float64, and become attributes of the same names.

    The sums are replaced and never written in place, so an earlier reference keeps its value.
    """

    def __init__(self, **sums: Tensor) -> None:
        self._names = tuple(sums)
        for name, zeros in sums.items():
            setattr(self, name, zeros)

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the outputs of a model and the targets of a batch; the task defines the arguments."""

    @abstractmethod
    def compute(self) -> Tensor | Mapping[str, Tensor]:
        """Return the result over all ranks; by name, where there is more than one number."""

    @property
    def metric_state(self) -> dict[str, Tensor]:
        """The sums by name."""
        return {name: getattr(self, name) for name in self._names}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load sums that were read before; the given tensors are copied."""
        for name, own in self.metric_state.items():
            setattr(self, name, state[name].to(own.device, own.dtype, copy=True))

    def total(self, name: str) -> Tensor:
        """Return a sum over all ranks in float64, on the host: not every device supports it."""
        return distributed.sum_tensor_over_ranks(getattr(self, name)).cpu().to(torch.float64)

    def reset(self) -> None:
        """Set all sums to zero."""
        for name, tensor in self.metric_state.items():
            setattr(self, name, torch.zeros_like(tensor))

    def to(self, device: torch.device) -> Metric:
        """Move the sums to `device`, in the widest floating-point dtype that it supports."""
        for name, tensor in self.metric_state.items():
            wide = widest_dtype(device) if tensor.is_floating_point() else tensor.dtype
            setattr(self, name, tensor.to(device, wide))
        return self


class Metrics:
    """Metrics by name, which all get the same update."""

    def __init__(self, each: Mapping[str, Metric] | None = None) -> None:
        self._each = dict(each or {})
        # Looked up once, not for every batch.
        self._parameters = {name: inspect.signature(metric.update).parameters for name, metric in self._each.items()}

    def __getitem__(self, name: str) -> Metric:
        return self._each[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)

    def items(self) -> ItemsView[str, Metric]:
        """Return the metrics with their names."""
        return self._each.items()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update every metric with the positional arguments, and with those keyword arguments that it declares."""
        for name, metric in self._each.items():
            metric.update(*args, **{key: value for key, value in kwargs.items() if key in self._parameters[name]})

    def compute(self) -> dict[str, Tensor]:
        """Return the results of all metrics by name."""
        found: dict[str, Tensor] = {}
        for name, metric in self._each.items():
            value = metric.compute()
            found |= {name: value} if isinstance(value, Tensor) else value
        return found

    def reset(self) -> None:
        """Set all metrics to zero."""
        for metric in self._each.values():
            metric.reset()

    def to(self, device: torch.device) -> Metrics:
        """Move all metrics to `device`."""
        for metric in self._each.values():
            metric.to(device)
        return self

    def snapshot(self) -> MetricSnapshot:
        """Return the sums as they are now; nothing is copied, since sums are never written in place."""
        return MetricSnapshot({name: metric.metric_state for name, metric in self._each.items()})

    def load_snapshot(self, before: MetricSnapshot) -> None:
        """Restore the sums of a snapshot."""
        for name, sums in before.sums.items():
            for key, tensor in sums.items():
                setattr(self._each[name], key, tensor)


class MetricSnapshot:
    """The sums at one moment. Its deep copy is itself, since the sums are never written in place."""

    def __init__(self, sums: dict[str, dict[str, Tensor]]) -> None:
        self.sums = sums

    def __deepcopy__(self, memo: object) -> MetricSnapshot:
        return self


class TopK(Metric):
    """The share of samples whose class is among the `k` highest scores."""

    right: Tensor
    samples: Tensor

    def __init__(self, k: int) -> None:
        super().__init__(right=_create_counter(), samples=_create_counter())
        self.k = k

    def update(self, scores: Tensor, label: Tensor) -> None:
        """Add the scores and true classes of a batch."""
        predicted = scores.argmax(1, keepdim=True) if self.k == 1 else scores.topk(self.k, 1).indices
        self.right = self.right + (predicted == label.unsqueeze(1)).sum()
        self.samples = self.samples + label.numel()

    def compute(self) -> Tensor:
        return self.total("right") / self.total("samples")


class PeakSignalNoiseRatio(Metric):
    """The peak signal-to-noise ratio in decibels over all pixels; both images are clamped to `range`."""

    squares: Tensor
    pixels: Tensor

    def __init__(self, range: tuple[float, float]) -> None:
        super().__init__(squares=torch.zeros((), dtype=torch.float64), pixels=_create_counter())
        self.range = range

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the images of a batch and their targets."""
        error = widen(preds).clamp(*self.range) - widen(target).clamp(*self.range)
        self.squares = self.squares + error.square().sum(dtype=self.squares.dtype)
        self.pixels = self.pixels + error.numel()

    def compute(self) -> Tensor:
        low, high = self.range
        return 10.0 * ((high - low) ** 2 * self.total("pixels") / self.total("squares")).log10()


def _create_counter() -> Tensor:
    return torch.zeros((), dtype=torch.int64)
