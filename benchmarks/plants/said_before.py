"""Seven runs that were judged wrong once, each in three precisions: what people really meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plants.plant import LOSS, Expected, Plant, Scene, plants

ALL = "fp16 bf16 fp32"
GOOD = 12
"""Steps before the one that fails."""
Batch = tuple[Tensor, ...]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(4, (8,))


def _entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def _turns_bad(model: nn.Module, loss_fn: Callable[..., Any], good: Any, bad: Any) -> Scene:
    return Scene(
        model,
        loss_fn,
        good,
        rate=1e-2,
        steps=GOOD + 1,
        scale=256.0,
        batch_at=lambda step: bad if step >= GOOD else good,
    )


def bad_rows() -> Scene:
    """The batch is indices, and half of the data set is NaN."""
    data, labels = torch.cat([torch.randn(8, 16), torch.full((8, 16), torch.nan)]), torch.randint(4, (8,))

    def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data[rows]).float(), labels)

    return _turns_bad(_net(), loss_fn, torch.arange(8), torch.arange(8, 16))


def all_ignored() -> Scene:
    """A tile without a single label."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1], ignore_index=-100)  # all ignored

    x, y = _batch()
    return _turns_bad(_net(), loss_fn, (x, y), (x, torch.full((8,), -100)))


def not_normalised() -> Scene:
    x, y = _batch()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return _turns_bad(model, _squares, (x, y), (x * 1e30, y))


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).float().square().mean()


def smoothed_over_a_mask() -> Scene:
    """Logits that a mask forbids, and labels that give each of them a share."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0]).float().masked_fill(batch[2], -torch.inf)
        return F.cross_entropy(logits, batch[1], label_smoothing=0.1)  # smoothed over a mask

    x, y = _batch()
    nothing, other = torch.zeros(8, 4, dtype=torch.bool), F.one_hot((y + 1) % 4, 4).bool()
    return _turns_bad(_net(), loss_fn, (x, y, nothing), (x, y, other))


def _spoilt(spoil: Callable[[Any], object]) -> Scene:
    model, batch = _net(), _batch()

    def before(step: int) -> None:
        if step == GOOD:
            spoil(model)

    return Scene(model, _entropy, batch, rate=1e-2, steps=GOOD + 1, scale=256.0, before=before)


def nan_weight() -> Scene:
    return _spoilt(lambda model: model[3].weight.data[0].fill_(torch.nan))


def negative_variance() -> Scene:
    return _spoilt(lambda model: (model[1].eval(), model[1].running_var.fill_(-1.0)))


class OwnNumbers(nn.Module):
    """Divides by zero for one draw from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.numbers = nn.Linear(16, 4), torch.Generator().manual_seed(0)
        self.unlucky: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(1, generator=self.numbers).item()
        return self.head(x / (0.0 if drawn == self.unlucky else 1.0))  # own numbers

    def aim(self) -> None:
        state = self.numbers.get_state()
        self.unlucky = torch.rand(1, generator=self.numbers).item()
        self.numbers.set_state(state)


def own_numbers() -> Scene:
    model = OwnNumbers()

    def before(step: int) -> None:
        if step >= GOOD:
            model.aim()

    return Scene(model, _entropy, _batch(), rate=1e-2, steps=GOOD + 1, scale=256.0, before=before)


def all_of_them() -> list[Plant]:
    return [
        *plants("bad_rows", ALL, bad_rows, Expected("data", words=("data contains nan in rows 8, 9",))),
        *plants("all_ignored", ALL, all_ignored,
                Expected("code", "aten.nll_loss_forward", LOSS, mark="all ignored", words=("averages over nothing",))),
        *plants("not_normalised", ALL, not_normalised, Expected("data", words=("the batch[0]", "reaches"))),
        *plants("smoothed_over_a_mask", ALL, smoothed_over_a_mask,
                Expected("code", "aten.neg", LOSS, mark="smoothed over a mask", words=("-inf",))),
        *plants("nan_since_a_checkpoint", ALL, nan_weight,
                Expected("state", outside="weight 3.weight", words=(f"step {GOOD}, the last",))),
        *plants("negative_variance", ALL, negative_variance,
                Expected("state", outside="buffer 1.running_var", words=("negative",))),
        *plants("own_numbers", ALL, own_numbers, Expected("code", "aten.div", "", mark="own numbers")),
    ]  # fmt: skip
