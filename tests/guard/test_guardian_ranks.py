"""Two processes, and trouble on one of them: both decide alike, and their weights stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import GuardEvent
from halfstep.precision.island import find_islands
from halfstep.step.loss import DynamicScale
from tests.support.digest import digest_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.square, self.last = nn.Linear(8, 16), Squares(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.square(self.one(x)))


class Squares(nn.Module):
    """Overflows fp16 for large inputs, and is harmless after its square root in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.square() + 1.0).sqrt().clamp(max=8.0) - x.square() * 0.0


def fit(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), x.nan_to_num().clamp(-1, 1)[:, :4])


def run(rank: int, precision: str, mode: Any, trouble: str) -> dict[str, Any]:
    model = Net()
    told: list[GuardEvent] = []
    scale = DynamicScale(init_scale=64.0) if precision == "fp16" else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=precision, loss_scale=scale, observe=False)
    guardian = Guardian(stepper, mode=mode, tell=told.append, limits=Limits(keep_every=5, spikes="refuse"))
    reasons, weights, error = [], [], ""
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        x = torch.randn(6, 8, generator=generator)
        factor = 1.0
        if rank == 1 and step >= 25 and trouble == "large":
            x *= 1e3
        if rank == 1 and step in (25, 26) and trouble == "nan":
            x[2] = float("nan")
        if rank == 1 and 25 <= step < 29 and trouble == "spike":
            factor = 1e5

        def loss_fn(model: nn.Module, x: Tensor, factor: float = factor) -> Tensor:
            return factor * fit(model, x)

        try:
            reasons.append(guardian.step(loss_fn, x).reason)
        except Diverged as gave_up:
            error = gave_up.given
            break
        weights.append(digest_of(dict(model.named_parameters())))
    return {
        "reasons": reasons,
        "weights": weights,
        "islands": list(find_islands(model)),
        "told": [(t.kind, t.text) for t in told],
        "remedies": guardian.remedies.as_dict(),
        "rollbacks": guardian.state_dict()["rollbacks"],
        "error": error,
    }


@pytest.mark.wording
@pytest.mark.parametrize(
    ("precision", "mode", "trouble"),
    [
        ("fp16", "repair", "large"),
        ("fp16", "watch", "large"),
        ("bf16", "repair", "nan"),
        ("bf16", "repair", "spike"),
    ],
)
def test_both_decide_alike(on_ranks: Ranks, precision: str, mode: str, trouble: str) -> None:
    zero, one = on_ranks(run, precision, mode, trouble)
    assert zero == one
    skipped = [step for step, reason in enumerate(zero["reasons"]) if reason is not None]
    assert skipped[0] == 25
    if trouble == "nan":
        assert skipped == [25, 26]
        assert zero["told"][0][1].startswith("data: ")
    elif trouble == "spike":
        assert zero["rollbacks"] == 1
        assert zero["error"] == ""
    elif mode == "repair":
        assert zero["islands"] == ["square"]
        assert skipped == [25]
    else:
        assert zero["error"].startswith("precision: ")
        assert "square" in zero["error"]
