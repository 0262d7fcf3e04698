"""Two processes: one decision, by one small collective, whatever one of them saw."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.errors import WrongUse
from tests.support.combinations import one_per_value
from tests.support.digest import digest_of
from tests.support.models import buffered_model, plain_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
NAN, INF = float("nan"), float("inf")


class Collectives:
    """Counts the bytes of each collective that Python calls; DDP's own reduction runs below Python."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._reduce = dist.all_reduce

    def __enter__(self) -> Collectives:
        dist.all_reduce = self._all_reduce  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._reduce  # type: ignore[assignment]

    def _all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.bytes.append(tensor.numel() * tensor.element_size())
        return self._reduce(tensor, *args, **kwargs)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def one_rank_sees_it(rank: int, poison: str, precision: str, fused: bool) -> dict[str, Any]:
    """Models that are not wrapped, so that nothing but the decision connects the ranks."""
    model: Any = buffered_model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0, precision=precision)
    scaler.include(model, schedule)
    unchanged, reasons, sent = [], [], []
    for step in range(3):
        optimizer.zero_grad()
        before = digest_of(model.state_dict(), optimizer.state_dict(), schedule.state_dict())
        out = model(batch(0, step))
        bad = rank == 1 and step == 1
        if bad and poison == "gradient":
            out.register_hook(lambda gradient: gradient * INF)
        if bad and poison == "buffer":
            model[1].running_mean.data.fill_(INF)
        loss = out.square().mean() * (NAN if bad and poison == "loss" else 1.0)
        scaler.scale(loss).backward()
        with Collectives() as collectives:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        sent.append(collectives.bytes)
        reasons.append(scaler.report.reason)
        unchanged.append(before == digest_of(model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    return {
        "unchanged": unchanged,
        "reasons": reasons,
        "sent": sent,
        "scale": scaler.get_scale(),
        "report": scaler.report,
    }


@pytest.mark.parametrize(
    *one_per_value(poison=["loss", "gradient", "buffer"], step=[("fp16", False), ("fp16", True), ("bf16", False)])
)
def test_what_one_rank_sees_skips_the_step_on_all(on_ranks: Ranks, poison: str, step: tuple[str, bool]) -> None:
    precision, fused = step
    first, second = on_ranks(one_rank_sees_it, poison, precision, fused)
    overflow = "gradient_overflow" if precision == "fp16" else "gradient_not_finite"
    reason = {"loss": "loss_not_finite", "gradient": overflow, "buffer": "buffer_not_finite"}[poison]
    for found in (first, second):
        assert found["unchanged"] == [False, True, False]
        assert found["reasons"] == [None, reason, None]
        assert all(len(sent) == 1 and sent[0] <= 128 for sent in found["sent"])
    assert first["scale"] == second["scale"]
    assert first["report"] == second["report"]


def under_ddp(rank: int, kind: str, steps: int, clip: bool, options: dict[str, Any]) -> tuple[str, Any]:
    model = DistributedDataParallel(plain_model(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler: Any = {"torch": torch.amp.GradScaler, "halfstep": halfstep.GradScaler}[kind]("cpu", init_scale=1024.0)
    for step in range(steps):
        optimizer.zero_grad()
        with contextlib.nullcontext() if "static_graph" in options else model.no_sync():
            scaler.scale(model(batch(rank, step)).square().mean() / 2).backward()
        scaler.scale(model(batch(rank, step + 50)).square().mean() / 2).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return digest_of(model.state_dict(), optimizer.state_dict()), getattr(scaler, "report", None)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_under_ddp_as_torch(on_ranks: Ranks, options: dict[str, Any], clip: bool) -> None:
    torchs, ours = (on_ranks(under_ddp, kind, 4, clip, options) for kind in ("torch", "halfstep"))
    assert ours[0][0] == ours[1][0] == torchs[0][0]
    assert ours[0][1] == ours[1][1]
    assert ours[0][1].applied


def clipped_too_early(rank: int) -> str:
    model = DistributedDataParallel(plain_model())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(batch(rank, 0)).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    try:
        scaler.step(optimizer)
    except WrongUse as error:
        return error.given
    return "not noticed"


@pytest.mark.wording
def test_clipping_too_early_is_noticed_under_ddp(on_ranks: Ranks) -> None:
    assert all("gradients of AdamW were written" in said for said in on_ranks(clipped_too_early))


def sharded(rank: int) -> tuple[list[Any], list[float], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plain.load_state_dict(model.state_dict())
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
    reasons, norms, unchanged = [], [], True
    for step in range(3):
        optimizer.zero_grad()
        before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        out = model(batch(0, step))
        if step == 1 and rank == 1:
            out.register_hook(lambda gradient: gradient * INF)
        scaler.scale(out.square().mean()).backward()
        if step == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.report is not None
        reasons.append(scaler.report.reason)
        norms.append(scaler.report.grad_norm)
        if step == 1:
            pairs = zip(before, model.parameters(), strict=True)
            unchanged = all(torch.equal(a, b.to_local()) for a, b in pairs)  # type: ignore[attr-defined]
    plain(batch(0, 0)).square().mean().backward()
    whole = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in plain.parameters()]))  # type: ignore[union-attr]
    return reasons, [norms[0], whole.item()], unchanged


def test_shards_of_fsdp2_are_one_gradient(on_ranks: Ranks) -> None:
    for reasons, (norm, whole), unchanged in on_ranks(sharded):
        assert reasons == [None, "gradient_overflow", None]
        assert norm == pytest.approx(whole, rel=1e-5)
        assert unchanged


def sharded_and_clipped_too_early(rank: int) -> bool:
    model = plain_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(batch(0, 0)).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.report is not None
    return scaler.report.applied


def test_limit_clipping_too_early_is_not_noticed_under_fsdp2(on_ranks: Ranks) -> None:
    assert on_ranks(sharded_and_clipped_too_early) == [True, True]
