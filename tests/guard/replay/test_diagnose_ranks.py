"""Two processes, one of which fails: the same reruns and one verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.guard.replay.agreement import agreed
from halfstep.guard.replay.diagnose import diagnose
from halfstep.guard.verdict import Culprit, Verdict
from halfstep.precision.registry import precision_named
from tests.support.models import plain_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def verdict_where(rank: int, bad: int, value: float, precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=precision_named(precision), observe=False)
    torch.manual_seed(10 + rank)
    x = torch.randn(6, 8)
    if rank == bad:
        x[4, 1] = value
    report = stepper.step(mse, x)
    assert stepper.attempt is not None
    return diagnose(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_nan_on_one_rank_is_the_same_verdict_on_both(on_ranks: Ranks, bad: int, precision: str) -> None:
    first, second = on_ranks(verdict_where, bad, float("nan"), precision)
    assert first == second
    assert first["cause"] == "data"
    assert first["sentence"] == f"data: the batch, sample 4 of rank {bad} holds nan"


def sharded(rank: int, value: float, precision: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = plain_model()
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 1e-3), precision=precision_named(precision), observe=False
    )
    x = torch.randn(6, 8)
    if rank == 1:
        x[2, 1] = value
    report = stepper.step(mse, x)
    assert stepper.attempt is not None
    return diagnose(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


def test_a_model_in_shards(on_ranks: Ranks) -> None:
    """The other process gets its gradients from this one, and is not to blame for them."""
    first, second = on_ranks(sharded, float("nan"), "fp32")
    assert first == second
    assert first["sentence"] == "data: the batch, sample 2 of rank 1 holds nan"


def test_gradients_of_a_model_in_shards(on_ranks: Ranks) -> None:
    """The loss is finite; what spoils the gradients went through a collective, which must not be run once more."""
    first, second = on_ranks(sharded, 1e6, "fp16")
    assert first == second
    assert first["sentence"].startswith("data: the batch, sample 2 of rank 1 reaches 1,000,000")
    assert (first["culprit"]["operation"], first["culprit"]["module"]) == ("aten._to_copy", "0")


def overflow_where(rank: int, bad: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = plain_model()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 1e-3), precision=precision_named("fp16"), observe=False
    )

    def loss_fn(model: Any, batch: dict[str, Any]) -> Tensor:
        hidden = model[0](batch["x"]) * 0 + 300.0
        return (hidden * batch["gain"]).float().mean() + mse(model, batch["x"])

    report = stepper.step(loss_fn, {"x": torch.randn(6, 8), "gain": 1000 if rank == bad else 1})
    assert stepper.attempt is not None
    return diagnose(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


def test_an_overflow_on_one_rank(on_ranks: Ranks) -> None:
    first, second = on_ranks(overflow_where, 1)
    assert first == second
    assert first["cause"] == "precision"
    assert first["culprit"]["operation"] == "aten.mul"
    assert first["culprit"]["in_fp32"] == 300000.0


def each_its_own(rank: int) -> str:
    culprit = Culprit("aten.mul", f"of rank {rank}", rank == 0, None, "fp16", ("inf",), 1.0, None, 65504.0)
    return agreed(Verdict("precision", f"rank {rank}", culprit, (), ())).sentence


def none_on_rank_zero(rank: int) -> str:
    culprit = Culprit("aten.mul", "up", True, None, "fp16", ("inf",), 1.0, None, 65504.0) if rank else None
    return agreed(Verdict("precision" if rank else "hardware", f"rank {rank}", culprit, (), ())).sentence


def test_forward_speaks_before_backward_and_a_culprit_before_none(on_ranks: Ranks) -> None:
    assert on_ranks(each_its_own) == ["rank 1", "rank 1"]
    assert on_ranks(none_on_rank_zero) == ["rank 1", "rank 1"]
