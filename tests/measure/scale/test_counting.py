"""Ranks that are counted without being there: against the same ranks for real, and against torch's own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Stepper, island
from halfstep.errors import UnknownName, WrongUse
from halfstep.measure.case import Case, build_case
from halfstep.measure.scale.counting import (
    AGREEMENT,
    GATHER,
    REDUCE,
    SCATTER,
    Collective,
    LazyChunks,
    RankCounts,
    count_rank_bytes,
)
from halfstep.measure.scale.layout import CollectiveGroup, RankLayout, list_layouts, resolve_ranks_and_nodes
from halfstep.measure.scale.traffic import LinkTraffic, compute_link_traffic, estimate_step_seconds, find_device_links
from halfstep.measure.scale.upkeep import estimate_goodput
from halfstep.measure.setting import StepSetting
from halfstep.save_interval import PUBLISHED
from halfstep.step.synchronizers.shard_units import list_shard_units
from tests.support.ranks import Ranks

WITHIN = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 10)
        self.statistics = nn.BatchNorm1d(10)
        island(self, "blocks.1.norm")

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.statistics(self.head(x.mean(1)))


def loss(model: nn.Module, words: Tensor) -> Tensor:
    return model(words).float().square().mean()


def case() -> Case:
    return build_case(Net(), loss, torch.randint(0, 100, (4, 8)))


class Sent(TorchDispatchMode):
    """Bytes of the collectives that really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [t.numel() * t.element_size() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
            self.bytes.setdefault(func.overloadpacket.__name__, []).append(max(sizes))
        return func(*args, **(kwargs or {}))


def really(rank: int, replicas: int, shard: int) -> dict[str, Any]:
    """Updates under FSDP2 on real ranks: what one holds after the first, and what the Stepper sends in the last."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, shard), mesh_dim_names=names)
    made = case()
    model: Any = made.model
    for unit in list_shard_units(model, torch.bfloat16):
        over = mesh if replicas > 1 else mesh["shard"]
        fully_shard(list(unit.modules), mesh=over, mp_policy=unit.policy(torch.bfloat16))
    optimizer = made.optimizer(model)
    with CommDebugMode() as calls:
        with torch.autocast("cpu", torch.bfloat16):
            value = made.loss_fn(model, made.batch)
        value.backward()
    optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    held += [t for state in optimizer.state.values() for t in state.values()]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in held]
    state = sum(t.numel() * t.element_size() for t in local)
    stepper = Stepper(model, optimizer, precision="bf16", clip_norm=1.0, observe=False)
    stepper.step(made.loss_fn, made.batch)
    with Sent() as sent:
        assert stepper.step(made.loss_fn, made.batch).applied
    return {"state": state, "sent": sent.bytes, "calls": sum(calls.get_comm_counts().values())}


def held_against_real_ranks(ranks: int, replicas: int, shard: int) -> None:
    started = Ranks(ranks)
    try:
        found = started(really, replicas, shard)
    finally:
        started.stop()
    counted = count_rank_bytes(case, StepSetting("bf16"), RankLayout(ranks, 1, shard))
    assert counted.state == pytest.approx(max(real["state"] for real in found), rel=WITHIN)
    assert found[0]["calls"] == len(counted.collectives) - 1  # the agreement is the Stepper's
    names = {"_allgather_base_": (GATHER,), "_reduce_scatter_base_": (SCATTER,), "allreduce_": (REDUCE, AGREEMENT)}
    assert set(found[0]["sent"]) == set(names)
    for name, sizes in found[0]["sent"].items():
        predicted = [one.bytes for one in counted.collectives if one.kind in names[name]]
        assert len(predicted) == len(sizes)
        assert sum(predicted) == pytest.approx(sum(sizes), rel=WITHIN)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "replicas", "shard"), [(2, 1, 2), (4, 2, 2)])
def test_counts_are_those_of_real_ranks(ranks: int, replicas: int, shard: int) -> None:
    held_against_real_ranks(ranks, replicas, shard)


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.timeout(600)
def test_counts_are_those_of_64_real_ranks() -> None:
    held_against_real_ranks(64, 4, 16)


def of_kind(counted: RankCounts, kind: str) -> list[Collective]:
    return [one for one in counted.collectives if one.kind == kind]


def test_the_agreement_of_the_stepper_is_one_small_all_reduce() -> None:
    for shard in (1, 2):
        (agreement,) = of_kind(count_rank_bytes(case, StepSetting("bf16"), RankLayout(8, 1, shard)), AGREEMENT)
        assert agreement.bytes == 16 * 8
        assert agreement.group == CollectiveGroup(8, 8)


def test_in_flight_is_two_units_gathered_and_one_being_reduced() -> None:
    def two_layers() -> Case:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
        return build_case(model, lambda net, x: net(x).float().sum(), torch.randn(2, 64))

    counted = count_rank_bytes(two_layers, StepSetting("bf16"), RankLayout(8, 1, 8))
    elements = 64 * 64
    assert counted.in_flight == 2 * elements * 2 + elements * 2 + elements * 4


def test_rows_fewer_than_ranks_are_padded_and_hsdp_avoids_it() -> None:
    many = count_rank_bytes(case, StepSetting("bf16"), RankLayout(1024, 128, 1024))
    few = count_rank_bytes(case, StepSetting("bf16"), RankLayout(1024, 128, 8))
    assert many.padded > 10
    assert few.padded < 1.1
    # One row of the widest parameters is the least that a rank can hold of them.
    assert many.weights == sum(p.numel() // p.shape[0] * 4 for p in Net().parameters())
    assert sum(c.bytes for c in of_kind(many, GATHER)) > 10 * sum(c.bytes for c in of_kind(few, GATHER))


def test_gathers_repeat_with_micro_batches_and_reductions_do_not() -> None:
    one, four = (count_rank_bytes(case, StepSetting("bf16", microbatches=n), RankLayout(8, 1, 8)) for n in (1, 4))
    assert len(of_kind(four, GATHER)) == 4 * len(of_kind(one, GATHER))
    assert len(of_kind(four, SCATTER)) == len(of_kind(one, SCATTER))


def test_fp32_gathers_twice_the_bytes_of_bf16() -> None:
    wide, narrow = (count_rank_bytes(case, StepSetting(name), RankLayout(8, 1, 8)) for name in ("fp32", "bf16"))
    assert sum(c.bytes for c in of_kind(wide, GATHER)) > 1.9 * sum(c.bytes for c in of_kind(narrow, GATHER))
    assert wide.state == narrow.state


def test_ddp_reduces_every_gradient_once_and_sends_buffers() -> None:
    counted = count_rank_bytes(case, StepSetting("bf16"), RankLayout(8, 1, 1))
    size = sum(p.nbytes for p in Net().parameters())
    assert sum(c.bytes for c in of_kind(counted, REDUCE)) == size == counted.gradients == counted.weights
    assert sum(c.bytes for c in of_kind(counted, "broadcast")) == sum(b.nbytes for b in Net().buffers())


@pytest.mark.parametrize(("rows", "chunks"), [(10, 4), (3, 8), (8, 8), (1, 1), (9, 8)])
def test_chunks_are_those_of_torch(rows: int, chunks: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    tensor = torch.arange(rows * 2).view(rows, 2)
    ours, theirs = LazyChunks(tensor, chunks, dim=0), _chunk_with_empty(tensor, chunks, dim=0)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if b.numel() or a.numel())


def test_links_carry_what_a_node_lacks_once() -> None:
    gather = Collective(GATHER, 1600, CollectiveGroup(16, 8), "forward")
    assert compute_link_traffic(gather) == LinkTraffic(1500 - 100, 100)
    assert compute_link_traffic(gather._replace(kind=REDUCE)) == LinkTraffic(2 * 1400, 200)
    assert compute_link_traffic(Collective(GATHER, 800, CollectiveGroup(8, 8), "forward")) == LinkTraffic(700, 0)
    assert compute_link_traffic(Collective(REDUCE, 400, CollectiveGroup(4, 1), "backward")) == LinkTraffic(0, 600)


def test_seconds_are_bytes_over_bandwidth_and_computing_hides_them() -> None:
    links = find_device_links("h100-80gb")
    assert links is not None
    counted = count_rank_bytes(case, StepSetting("bf16"), RankLayout(1024, 128, 1024))
    found = estimate_step_seconds(counted, links, 1)
    assert found is not None
    assert 0 < found.exposed <= found.communication
    hidden = estimate_step_seconds(counted, links, 10**9)
    assert hidden is not None
    assert hidden.exposed == 0
    assert estimate_step_seconds(counted, None, 1) is None


def test_the_save_interval_is_youngs() -> None:
    llama = estimate_goodput(PUBLISHED[0], 1024, stall=2.0, restart=0.0)
    assert llama.mean_time_between_failures == pytest.approx(54 * 24 * 3600 / 419 * 16, rel=1e-9)
    assert llama.save_every == pytest.approx((2 * 2.0 * llama.mean_time_between_failures) ** 0.5)
    worse = [
        2.0 / every + every / 2 / llama.mean_time_between_failures
        for every in (llama.save_every / 2, llama.save_every * 2)
    ]
    assert all(1 - lost < llama.goodput for lost in worse)


def test_auto_tries_the_least_sharding_first() -> None:
    found = [str(layout) for layout in list_layouts(64, 8, "auto", None)]
    assert found == ["ddp", "hsdp 8×8", "hsdp 4×16", "hsdp 2×32", "fsdp"]
    assert [str(layout) for layout in list_layouts(8, 1, "auto", None)] == ["ddp", "fsdp"]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("world", "nodes", "sharding", "shard", "said"),
    [
        (10, 4, "auto", None, "10 ranks on 4 nodes"),
        (0, None, "auto", None, "--world 0"),
        (64, 8, "hsdp", 7, "--shard-size 7"),
        (64, 8, "auto", 0, "--shard-size 0"),
        (24, 4, "auto", 4, "--shard-size 4"),
        (64, 8, "fsdp", 8, "which is hsdp"),
        (8, 1, "hsdp", None, "--sharding hsdp"),
        (1, 1, "fsdp", None, "--sharding fsdp"),
    ],
)
def test_ranks_that_cannot_be_are_refused(world: int, nodes: int, sharding: str, shard: int, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        list_layouts(*resolve_ranks_and_nodes(world, nodes), sharding, shard)


@pytest.mark.wording
def test_an_unknown_sharding_is_named() -> None:
    with pytest.raises(UnknownName, match="zero3"):
        list_layouts(8, 1, "zero3", None)


def test_a_world_of_one_needs_nothing() -> None:
    counted = count_rank_bytes(case, StepSetting("fp32"), RankLayout(1, 1, 1))
    assert counted.collectives == ()
    assert counted.in_flight == 0
