"""What the trainer costs on two ranks next to bare loops with DDP and with FSDP2, on the same model and data.

    python benchmarks/ranks_overhead.py [--pairs 40] [--ranks 2] [--record]

Blocks of a transformer's feed-forward layers, fp32, AdamW, clipping by norm; the samples lie in memory. The trainer's
step is all of it: loader, transaction, agreement of the ranks, journal, comparison of the replicas. The bare loops
wrap the model as torch's documentation does, and read no loss. Throughput is the median over interleaved pairs, on the
first rank; `aa` is a bare loop against itself. Collectives are those that torch's dispatcher sees in one step, so that
those of DDP's own reducer are in neither count; `digest` is one comparison of all replicas, in steps.
"""

from __future__ import annotations

import argparse
import copy
import io
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_memory import InMemory, Memory, steps
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from halfstep import clock
from halfstep.journal.events import Journal
from halfstep.journal.listeners import create_listeners
from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.recipe.resolve import resolve_recipe
from halfstep.train.run import make_loop
from halfstep.train.state import State

RECORD = Path(__file__).with_suffix(".json")
BATCH, TOKENS, WIDTH, BLOCKS, SAMPLES, CLIP, LR = 8, 32, 512, 4, 64, 1.0, 1e-4
MODES = ("ddp", "fsdp")


class Block(nn.Module):
    """A feed-forward layer after a norm, next to a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def loss_of(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(net(batch["x"]), batch["y"])


def memory_of_rows() -> Memory:
    generator = torch.Generator().manual_seed(0)
    return Memory(**{name: torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator) for name in ("x", "y")})


class Rows(InMemory):
    def model(self) -> nn.Module:
        return model()

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        return loss_of(model, batch)


def bare(mode: str, memory: Memory) -> Callable[[], object]:
    """Return the step of a loop without halfstep."""
    net: nn.Module = model()
    if mode == "fsdp":
        for block in net.children():
            fully_shard(block)
        fully_shard(net)
    else:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), LR, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parameters = list(net.parameters())
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(memory, batch_size=BATCH, shuffle=True)))

    def step() -> None:
        loss_of(net, next(batches)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trainer(mode: str, memory: Memory, folder: Path) -> Any:
    """Return the trainer's loop."""
    Rows.memory = memory
    raw = {
        "task": "in memory",
        "precision": "fp32",
        "world": mode,
        "optimizer": {"name": "adamw", "lr": LR},
        "schedule": {"name": "constant"},
        "train": {"steps": 10**6, "batch_size": BATCH, "clip_norm": CLIP, "num_workers": 0, "seed": 0, "device": "cpu"},
    }
    recipe = resolve_recipe(raw, Rows.schema, (), "overhead").recipe
    console = Console(file=io.StringIO())
    told = create_listeners(folder, tracker="none", console=console) if dist.get_rank() == 0 else ()
    loop = make_loop(Rows(recipe), recipe, folder, Journal(told))
    loop.model.train()
    return loop


def compared(mode: str, pairs: int, memory: Memory, folder: Path) -> dict[str, Any]:
    """Return throughput, collectives and the cost of a comparison of the replicas."""
    loop = trainer(mode, memory, folder)
    arms = {"bare": bare(mode, memory), "aa": bare(mode, memory), "halfstep": steps(loop).__next__}
    for step in arms.values():
        for _ in range(5):
            step()
    found = clock.measure_time_ratios(arms, baseline="bare", pairs=pairs)
    calls = {name: collectives(arms[name]) for name in ("bare", "halfstep")}
    seconds = clock.measure_call_seconds(arms["halfstep"], 5)
    began = time.perf_counter()
    loop.checkpoints.replicas.check(State.of(loop.live))
    return {
        "throughput": round(1 / found["halfstep"].median, 3),
        "aa": round(1 / found["aa"].median, 3),
        "step_ms": round(seconds * 1e3, 1),
        "extra_collectives": calls["halfstep"] - calls["bare"],
        "digest_steps": round((time.perf_counter() - began) / seconds, 2),
    }


def collectives(step: Callable[[], object]) -> int:
    """Return the collectives of one step: the fewest of several, for a step that logs or compares replicas has more."""
    found = []
    for _ in range(4):
        with CommDebugMode() as seen:
            step()
        found.append(int(seen.get_total_counts()))
    return min(found)


def rank_main(rank: int, ranks: int, port: int, pairs: int, out: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    memory = memory_of_rows()
    found = {mode: compared(mode, pairs, memory, Path(out) / mode) for mode in MODES}
    if rank == 0:
        (Path(out) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    before = copy.deepcopy(collect_conditions())
    with tempfile.TemporaryDirectory() as out:
        for mode in MODES:
            (Path(out) / mode).mkdir()
        probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = probe.port
        del probe
        torch.multiprocessing.spawn(rank_main, (asked.ranks, port, asked.pairs, out), nprocs=asked.ranks)
        found = json.loads((Path(out) / "found.json").read_text())
    print(describe_conditions(before))
    for mode, figures in found.items():
        print(f"{mode}: " + " ".join(f"{key}={value}" for key, value in figures.items()))
    print("ranks_overhead " + " ".join(f"{mode}={found[mode]['throughput']}" for mode in MODES))
    if asked.record:
        command = f"python benchmarks/ranks_overhead.py --pairs {asked.pairs} --ranks {asked.ranks} --record"
        RECORD.write_text(json.dumps({"command": command, "conditions": before, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
