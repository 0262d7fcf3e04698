"""A layout: how many ranks on how many nodes, and over how many of them the model is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from halfstep.errors import UnknownName, WrongUse

AUTO, DDP, FSDP, HSDP = "auto", "ddp", "fsdp", "hsdp"
SHARDINGS = (AUTO, DDP, FSDP, HSDP)
MOST_RANKS = 1 << 16
_USUAL = 8
"""GPUs of a node, where the number of nodes is left out."""


class CollectiveGroup(NamedTuple):
    """The ranks of one collective."""

    ranks: int
    in_node: int
    """How many of them are on the same node."""

    @property
    def nodes(self) -> int:
        return self.ranks // self.in_node


@dataclass(frozen=True)
class RankLayout:
    """Ranks in the order of their nodes; `shard_size` neighboring ones hold the model together, in several copies.

    `shard_size` is 1 under DDP, the world under FSDP, and between them under HSDP.
    """

    world: int
    nodes: int
    shard_size: int

    @property
    def sharding(self) -> str:
        """`ddp`, `fsdp` or `hsdp`."""
        return DDP if self.shard_size == 1 else FSDP if self.shard_size == self.world else HSDP

    @property
    def per_node(self) -> int:
        return self.world // self.nodes

    @property
    def replicas(self) -> int:
        return self.world // self.shard_size

    @property
    def everyone(self) -> CollectiveGroup:
        return CollectiveGroup(self.world, self.per_node)

    @property
    def shards(self) -> CollectiveGroup:
        """The ranks that hold the model together."""
        return CollectiveGroup(self.shard_size, min(self.shard_size, self.per_node))

    @property
    def copies(self) -> CollectiveGroup:
        """The ranks that hold the same shard."""
        return CollectiveGroup(self.replicas, max(1, self.per_node // self.shard_size))

    def __str__(self) -> str:
        return f"hsdp {self.replicas}×{self.shard_size}" if self.sharding == HSDP else self.sharding


def resolve_ranks_and_nodes(world: int, nodes: int | None) -> tuple[int, int]:
    """Return both, nodes of 8 where they are left out. Raises `WrongUse` for numbers that cannot be."""
    if not 1 <= world <= MOST_RANKS:
        raise WrongUse(f"--world {world}", allowed=f"1 to {MOST_RANKS} ranks", do="--world 1024")
    if nodes is None:
        nodes = world // _USUAL if world % _USUAL == 0 else 1
    if nodes < 1 or world % nodes:
        usual = f"--nodes {world // _USUAL}" if world % _USUAL == 0 else "--nodes 1"
        raise WrongUse(f"{world} ranks on {nodes} nodes", allowed="the same number of ranks on every node", do=usual)
    return world, nodes


def list_layouts(world: int, nodes: int, sharding: str, shard: int | None) -> list[RankLayout]:
    """Return the layouts that were requested, the least sharded first; for `auto` all of them.

    Those are DDP, HSDP within a node, HSDP over 2, 4, 8, ... nodes, and FSDP. Raises `UnknownName` for a sharding that
    there is not, and `WrongUse` for a shard size that does not go with it.
    """
    if sharding not in SHARDINGS:
        raise UnknownName(f"sharding {sharding!r}", allowed=", ".join(SHARDINGS), do="--sharding auto, or leave it out")
    if shard is not None:
        return [_build_layout_of_size(world, nodes, sharding, shard)]
    found = [RankLayout(world, nodes, size) for size in (1, *_list_shard_sizes(world, nodes), world)]
    found = list(dict.fromkeys(found))
    if sharding == AUTO:
        return found
    kept = [layout for layout in found if layout.sharding == sharding or (world == 1 and sharding == DDP)]
    if kept:
        return kept
    raise WrongUse(
        f"--sharding {sharding} on {world} ranks and {nodes} nodes",
        allowed="fsdp on 2 ranks or more, hsdp with a shard size between 1 and the world",
        do=f"--sharding {DDP}" if world == 1 else f"--sharding {FSDP}, or --shard-size with a part of {world}",
    )


def _list_shard_sizes(world: int, nodes: int) -> list[int]:
    """Return the sizes of shard groups to try: a node, then twice as many ranks each time."""
    size, found = world // nodes, []
    while 1 < size < world:
        if world % size == 0:
            found.append(size)
        size *= 2
    return found


def _build_layout_of_size(world: int, nodes: int, sharding: str, shard: int) -> RankLayout:
    per_node = world // nodes
    whole = shard >= 1 and world % shard == 0 and (per_node % shard == 0 or shard % per_node == 0)
    if not whole:
        raise WrongUse(
            f"--shard-size {shard} for {world} ranks, {per_node} on a node",
            allowed="a size that divides the world, and a node or whole nodes",
            do=f"--shard-size {per_node}",
        )
    layout = RankLayout(world, nodes, shard)
    if sharding not in (AUTO, layout.sharding):
        raise WrongUse(
            f"--sharding {sharding} with --shard-size {shard} of {world} ranks, which is {layout.sharding}",
            allowed="ddp with 1, fsdp with all ranks, hsdp with a size between",
            do=f"--sharding {layout.sharding}, or leave it out",
        )
    return layout
