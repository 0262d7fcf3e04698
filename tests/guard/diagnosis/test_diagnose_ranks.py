"""Two processes, one of which fails: the same reruns and one verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Counted, Stepper, Window
from halfstep.guard.diagnosis.diagnose import agree_on_verdict, diagnose_attempt
from halfstep.guard.verdict import Culprit, Verdict
from halfstep.precision.precision import resolve_precision_name
from tests.support.models import plain_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def verdict_where(rank: int, bad: int, value: float, precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=resolve_precision_name(precision), observe=False)
    torch.manual_seed(10 + rank)
    x = torch.randn(6, 8)
    if rank == bad:
        x[4, 1] = value
    report = stepper.step(mse, x)
    assert stepper.attempt is not None
    return diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_nan_on_one_rank_is_the_same_verdict_on_both(on_ranks: Ranks, bad: int, precision: str) -> None:
    first, second = on_ranks(verdict_where, bad, float("nan"), precision)
    assert first == second
    assert first["cause"] == "data"
    assert first["sentence"] == f"data: the batch, sample 4 of rank {bad} contains nan"


def sharded(rank: int, value: float, precision: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = plain_model()
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 1e-3), precision=resolve_precision_name(precision), observe=False
    )
    x = torch.randn(6, 8)
    if rank == 1:
        x[2, 1] = value
    report = stepper.step(mse, x)
    assert stepper.attempt is not None
    return diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


def test_a_model_in_shards(on_ranks: Ranks) -> None:
    """The other process gets its gradients from this one, and is not to blame for them."""
    first, second = on_ranks(sharded, float("nan"), "fp32")
    assert first == second
    assert first["sentence"] == "data: the batch, sample 2 of rank 1 contains nan"


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
        model, torch.optim.SGD(model.parameters(), 1e-3), precision=resolve_precision_name("fp16"), observe=False
    )

    def loss_fn(model: Any, batch: dict[str, Any]) -> Tensor:
        hidden = model[0](batch["x"]) * 0 + 300.0
        return (hidden * batch["gain"]).float().mean() + mse(model, batch["x"])

    report = stepper.step(loss_fn, {"x": torch.randn(6, 8), "gain": 1000 if rank == bad else 1})
    assert stepper.attempt is not None
    return diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


def test_an_overflow_on_one_rank(on_ranks: Ranks) -> None:
    first, second = on_ranks(overflow_where, 1)
    assert first == second
    assert first["cause"] == "precision"
    assert first["culprit"]["operation"] == "aten.mul"
    assert first["culprit"]["in_fp32"] == 300000.0


def verdict_of(loss_fn: Any, batch: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 1e-3), precision=resolve_precision_name("fp32"), observe=False
    )
    report = stepper.step(loss_fn, batch)
    assert stepper.attempt is not None
    return diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason)).as_dict()


def written_on_one(rank: int) -> dict[str, Any]:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = (model(x.clone()) * 0 + x.clone().min().log()).mean()
        if (x < 0).any():
            x.clamp_(min=1.0)
        return loss

    x = torch.rand(4, 4) + 0.1
    if rank == 1:
        x[0, 0] = -1.0
    return verdict_of(loss_fn, x)


def test_a_batch_that_one_rank_wrote_to(on_ranks: Ranks) -> None:
    first, second = on_ranks(written_on_one)
    assert first == second
    assert "written to in place" in first["sentence"]


def far_on_one(rank: int) -> dict[str, Any]:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        total = x.detach().sum()
        torch.distributed.all_reduce(total)  # in each micro-batch, on both ranks
        return (model(x) * x.abs().max()).square().mean()

    window = Window([torch.rand(1, 4), torch.rand(1, 4)])
    if rank == 1:
        window[0] *= 1e20
    return verdict_of(loss_fn, window)


def test_a_sample_of_one_rank_that_is_left_out_leaves_as_many_micro_batches(on_ranks: Ranks) -> None:
    first, second = on_ranks(far_on_one)
    assert first == second
    assert first["sentence"].startswith("data: micro-batch 0, sample 0 of rank 1 reaches")


def nothing_counted_on(rank: int, empty: tuple[int, ...]) -> dict[str, Any]:
    def loss_fn(model: nn.Module, x: Tensor) -> Counted:
        total = (model(x) / (1.0 if empty == (0, 1) else 0.0)).sum() * (rank not in empty)
        return Counted(total, 0 if rank in empty else 4)

    return verdict_of(loss_fn, torch.rand(4, 4))


def test_a_rank_may_count_nothing_where_another_one_does(on_ranks: Ranks) -> None:
    first, second = on_ranks(nothing_counted_on, (0,))
    assert first == second
    assert first["sentence"].endswith("divides by zero; the step already runs in fp32")
    first, second = on_ranks(nothing_counted_on, (0, 1))
    assert first == second
    assert "counts no element" in first["sentence"]


def each_its_own(rank: int) -> str:
    culprit = Culprit("aten.mul", f"of rank {rank}", rank == 0, None, "fp16", ("inf",), 1.0, None, 65504.0)
    return agree_on_verdict(Verdict("precision", f"rank {rank}", culprit, (), ())).sentence


def none_on_rank_zero(rank: int) -> str:
    culprit = Culprit("aten.mul", "up", True, None, "fp16", ("inf",), 1.0, None, 65504.0) if rank else None
    return agree_on_verdict(
        Verdict("precision" if rank else "not_reproducible", f"rank {rank}", culprit, (), ())
    ).sentence


def test_forward_speaks_before_backward_and_a_culprit_before_none(on_ranks: Ranks) -> None:
    assert on_ranks(each_its_own) == ["rank 1", "rank 1"]
    assert on_ranks(none_on_rank_zero) == ["rank 1", "rank 1"]
