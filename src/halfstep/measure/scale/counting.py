"""Count the state and the collectives of one rank, on a process group without peers and tensors without memory.

torch's own `fully_shard` divides the parameters and sends them, so the padding of a parameter with fewer rows than
ranks is torch's too. Sizes come from rank 0, which has the most. Nothing is modeled here but DDP, which does not run
on such a group: its buckets are those that torch computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from halfstep import distributed
from halfstep.errors import WrongUse
from halfstep.measure.batches import count_samples, list_tensors, move_batch, resize_batch, sum_storage_bytes
from halfstep.measure.case import SEED, Case, resolve_precision
from halfstep.measure.memory.estimate import replace_attribute
from halfstep.measure.memory.fake_tensors import (
    OptimizerNumberMode,
    build_fake_case,
    create_fake_mode,
    refuse_number_reads,
    resolve_fake_loss,
)
from halfstep.measure.memory.fake_tensors import move_fake_model as placed_model
from halfstep.measure.scale.layout import CollectiveGroup, RankLayout
from halfstep.measure.setting import StepSetting
from halfstep.observe.reachable import find_generators
from halfstep.precision.island import mark_inner_islands
from halfstep.precision.precision import Precision
from halfstep.random_state import use_seeded_generators
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.step.agreement import AGREEMENT_BYTES
from halfstep.step.synchronizers.shard_units import ShardUnit, apply_fully_shard, create_shard_mesh, list_shard_units

GATHER, SCATTER, REDUCE, BROADCAST, AGREEMENT = "all-gather", "reduce-scatter", "all-reduce", "broadcast", "agreement"
KINDS = (GATHER, SCATTER, REDUCE, BROADCAST, AGREEMENT)
_SENT = {"_allgather_base_": GATHER, "_reduce_scatter_base_": SCATTER, "allreduce_": REDUCE}
"""Names of torch's operations."""
FORWARD, BACKWARD = "forward", "backward"
_HOST = torch.device("cpu")
_BUCKETS = [1 << 20, 25 << 20]
"""DistributedDataParallel's defaults: the first bucket, and the others."""


class Collective(NamedTuple):
    """One collective of a step."""

    kind: str
    bytes: int
    """The bytes gathered, reduced or sent: the larger side."""
    group: CollectiveGroup
    phase: str


@dataclass(frozen=True)
class RankCounts:
    """The bytes that one rank holds and sends in a layout."""

    layout: RankLayout
    parameters: int
    """Numbers in the model, not bytes."""
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    units: int
    in_flight: int
    """At most: parameters of others while their units run, gradients not yet reduced, and buckets."""
    padded: float
    """Elements held by all ranks of a shard group, for one of the model: above 1 where rows are fewer than ranks."""
    collectives: tuple[Collective, ...]
    flops: int
    """Multiplications and additions of one micro-batch, forward and backward."""

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


def count_rank_bytes(make_case: Callable[[], Case], setting: StepSetting, layout: RankLayout) -> RankCounts:
    """Return the counts of one update in this layout.

    Raises `WrongUse` inside of a process group, for a parameter that FSDP2 cannot divide, and for code that needs the
    values of tensors.
    """
    if dist.is_initialized():
        raise WrongUse(
            "an estimate for several ranks inside of a process group",
            allowed="a separate process: the ranks are counted without a real group",
            do="halfstep estimate, or dist.destroy_process_group() before",
        )
    precision = resolve_precision(setting.precision, _HOST)
    mode = create_fake_mode()
    case = build_fake_case(make_case, mode)
    mark_inner_islands(case.model)
    # The mesh has numbers, and is made before the mode.
    drawn = use_seeded_generators(SEED, objects=find_generators(case.loss_fn, case.batch))
    with _open_fake_group(layout) as mesh, drawn, mode, refuse_number_reads("ranks are counted without computing any"):
        placed_model(case.model, _HOST, channels_last=False)  # a large recipe's model is built on no device
        if layout.shard_size == 1:
            return _count_replicated(case, setting, precision, layout)
        return _count_sharded(case, setting, precision, layout, mesh)


@dataclass
class _FakeUpdate:
    """An update of a fake model, and its communication."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    collectives: list[Collective]
    flops: int
    gradients: int


def _run_fake_update(case: Case, setting: StepSetting, precision: Precision, layout: RankLayout) -> _FakeUpdate:
    optimizer = case.optimizer(case.model)
    batch = move_batch(case.batch, _HOST, setting.channels_last)
    batch = resize_batch(batch, setting.batch or count_samples(batch))
    sent = _CollectiveRecorder(layout)
    with sent, FlopCounterMode(display=False) as flops:
        with precision.scope(_HOST):
            with precision.autocast(_HOST):
                loss = case.loss_fn(case.model, batch)
            sent.phase = BACKWARD
            resolve_fake_loss(loss).backward()  # type: ignore[no-untyped-call]
        torch.clear_autocast_cache()
    gradients = sum_storage_bytes(
        distributed.unwrap_local_tensor(p.grad) for p in case.model.parameters() if p.grad is not None
    )
    with OptimizerNumberMode():
        optimizer.step()
    return _FakeUpdate(case.model, optimizer, sent.collectives, int(flops.get_total_flops()), gradients)


class _CollectiveRecorder(TorchDispatchMode):
    """A mode that records FSDP2's collectives."""

    def __init__(self, layout: RankLayout) -> None:
        super().__init__()
        self.layout, self.phase = layout, FORWARD
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _SENT.get(func.overloadpacket.__name__) if func.namespace == "c10d" else None
        if kind is not None:
            # An all-reduce goes over the replicas of a shard; there is none under plain FSDP.
            group = self.layout.copies if kind == REDUCE else self.layout.shards
            size = max(t.nbytes for t in pytree.tree_leaves(args[:2]) if isinstance(t, Tensor))
            self.collectives.append(Collective(kind, size, group, self.phase))
        return func(*args, **(kwargs or {}))


def _build_rank_counts(
    done: _FakeUpdate, layout: RankLayout, collectives: Sequence[Collective], microbatches: int, **more: Any
) -> RankCounts:
    agreement = Collective(AGREEMENT, AGREEMENT_BYTES, layout.everyone, BACKWARD)
    # Every micro-batch gathers; gradients are reduced in the last one.
    gathers = [c for c in collectives if c.kind == GATHER]
    repeated = [*collectives, *gathers * (microbatches - 1)]
    state = list_tensors([list(some.values()) for some in done.optimizer.state.values()])
    weights = sum_storage_bytes(distributed.unwrap_local_tensor(p) for p in done.model.parameters())
    numbers = sum(p.numel() for p in done.model.parameters())
    local = sum(distributed.unwrap_local_tensor(p).numel() for p in done.model.parameters())
    return RankCounts(
        layout=layout,
        parameters=numbers,
        weights=weights,
        gradients=done.gradients,
        optimizer=sum_storage_bytes(distributed.unwrap_local_tensor(tensor) for tensor in state),
        buffers=sum_storage_bytes(done.model.buffers()),
        padded=local * layout.shard_size / numbers,
        collectives=(*repeated, *([agreement] if layout.world > 1 else [])),
        flops=done.flops,
        **more,
    )


def _count_sharded(case: Case, setting: StepSetting, precision: Precision, layout: RankLayout, mesh: Any) -> RankCounts:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    narrow = precision.narrow
    units = list_shard_units(case.model, narrow)
    if setting.recompute:
        checkpoint_activations(case.model)
    # FSDP2 gets only the chunks that it reads: 1,024 of each parameter as tensors take minutes for 8 B parameters.
    with replace_attribute(_fsdp_param, "_chunk_with_empty", LazyChunks):
        apply_fully_shard(units, mesh, narrow)
    done = _run_fake_update(case, setting, precision, layout)
    flying = _estimate_peak_in_flight(units, narrow, layout.shard_size)
    holding = sum(1 for _, own in _iterate_own_parameters(units) if own)
    return _build_rank_counts(done, layout, done.collectives, setting.microbatches, units=holding, in_flight=flying)


def _iterate_own_parameters(units: Sequence[ShardUnit]) -> Iterator[tuple[ShardUnit, list[nn.Parameter]]]:
    """Yield each unit with its own parameters: those that no unit inside of it holds."""
    held: set[int] = set()
    for unit in units:
        own = [p for p in unit.parameters() if id(p) not in held]
        held |= {id(p) for p in own}
        yield unit, own


def _estimate_peak_in_flight(units: Sequence[ShardUnit], narrow: torch.dtype | None, shard: int) -> int:
    """Return the peak memory besides the shards: FSDP2 gathers one unit ahead, and reduces one behind.

    The model's own unit stays gathered from its forward to its backward, with its gradients once they exist.
    """
    sizes = []
    for unit, own in _iterate_own_parameters(units):
        elements = sum(distributed.unwrap_local_tensor(p).numel() for p in own) * shard
        gathered = elements * (narrow.itemsize if narrow is not None and not unit.wide else 4)
        sizes.append((gathered, elements * 4))
    *blocks, (root, root_reduced) = sizes
    running = max((3 * gathered + reduced for gathered, reduced in blocks), default=0)
    return 2 * root + max(running, root_reduced)


@contextmanager
def _open_fake_group(layout: RankLayout) -> Iterator[Any]:
    """Yield the mesh of a process group of which only this rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=layout.world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield create_shard_mesh(_HOST, layout.world, layout.shard_size)
    finally:
        dist.destroy_process_group()


class LazyChunks(Sequence[Tensor]):
    """The chunks of `torch.chunk`, made when they are read, and as many as were requested: the last may be empty."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._chunks, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._chunks

    def __getitem__(self, index: Any) -> Any:
        rows = self._tensor.size(self._dim)
        each = -(-rows // self._chunks)
        begin = min(range(self._chunks)[index] * each, rows)
        return self._tensor.narrow(self._dim, begin, min(each, rows - begin))


def _count_replicated(case: Case, setting: StepSetting, precision: Precision, layout: RankLayout) -> RankCounts:
    if setting.recompute:
        checkpoint_activations(case.model)
    done = _run_fake_update(case, setting, precision, layout)
    buckets, sent = list[int](), list[Collective]()
    if layout.world > 1:
        trained = [p for p in case.model.parameters() if p.requires_grad]
        described = [torch.empty_like(p, device="meta") for p in trained]
        found, _ = dist._compute_bucket_assignment_by_size(described, _BUCKETS)  # type: ignore[attr-defined]
        buckets = [sum(trained[number].nbytes for number in bucket) for bucket in found]
        sent += [Collective(REDUCE, size, layout.everyone, BACKWARD) for size in buckets]
        # Rank 0's buffers, one broadcast for each dtype: see step/synchronizers/replicated.py.
        by_dtype = itertools.groupby(sorted(case.model.buffers(), key=lambda b: str(b.dtype)), lambda b: b.dtype)
        sent += [Collective(BROADCAST, sum(b.nbytes for b in some), layout.everyone, FORWARD) for _, some in by_dtype]
    return _build_rank_counts(done, layout, sent, setting.microbatches, units=len(buckets), in_flight=sum(buckets))
