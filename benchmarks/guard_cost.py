"""What every guard together costs next to the same step without one, on a model of ordinary size.

    python benchmarks/guard_cost.py [--pairs 60] [--size 224] [--batch 16] [--json] [--record]

ResNet-50, batch 16, 224², bf16, channels_last, fused AdamW, clipping by norm. The baseline is the Stepper alone, which
already checks loss and gradients; the guarded arms have a Guardian round it with all alarms and meters, once in watch
and once in repair mode. What happens on every step is timed as paired, interleaved steps. What happens now and then
would hide behind a median, so it is timed by itself and shared out: a step that the meters sample (one in 50), and a
copy of the run in memory (one in 100, in repair mode). `aa` is the baseline against itself. Host reads are counted over
steps of which one is sampled. `--record` keeps the result in benchmarks/guard_cost.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Stepper, clock
from halfstep.guard.guardian import Guardian
from halfstep.guard.monitors.monitors import FIRST, Meters
from halfstep.guard.repair.snapshot import RollbackSnapshot
from halfstep.guard.streak import Limits
from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem

RECORD = Path(__file__).with_suffix(".json")
EVERY, KEEP_EVERY = 50, Limits().keep_every
NEVER = 10**9
COPIES = 7
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Made:
    """Builds arms that differ in nothing but their guards."""

    batch: int
    size: int

    def stepper(self) -> tuple[Stepper, Batch]:
        torch.manual_seed(0)
        model = timm.create_model("resnet50", num_classes=100).to(memory_format=torch.channels_last)
        images = torch.randn(self.batch, 3, self.size, self.size).contiguous(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        stepper = Stepper(model, optimizer, precision="bf16", clip_norm=1.0, observe=False)
        return stepper, (images, torch.randint(0, 100, (self.batch,)))

    def alone(self) -> Callable[[], object]:
        stepper, batch = self.stepper()
        return lambda: stepper.step(loss_fn, batch)

    def guarded(self, mode: Literal["watch", "repair"]) -> Callable[[], object]:
        """Without what happens now and then."""
        stepper, batch = self.stepper()
        meters = Meters(stepper, every=NEVER)
        for _ in range(FIRST):  # its first sample falls into the steps that warm up
            meters.before()
        guardian = Guardian(stepper, mode=mode, limits=Limits(keep_every=NEVER), meters=meters, tell=quiet)
        return lambda: guardian.step(loss_fn, batch)

    def sampled(self) -> Callable[[], object]:
        """Every step is one that the meters look at, and what they saw is read as part of it."""
        stepper, batch = self.stepper()
        meters = Meters(stepper, every=1)
        guardian = Guardian(stepper, limits=Limits(keep_every=NEVER), meters=meters, tell=quiet)

        def step() -> None:
            report = guardian.step(loss_fn, batch)
            meters.before()
            meters.after(report)

        return step

    def copying(self) -> float:
        """Seconds of one copy of the run in memory, over an older one."""
        stepper, batch = self.stepper()
        stepper.step(loss_fn, batch)
        snapshot = RollbackSnapshot(stepper)
        snapshot.take()
        return statistics.median(clock.measure_call_seconds(snapshot.take, 1) for _ in range(COPIES))


def quiet(told: object) -> None:
    """What a guard says is not what is measured."""


class Reads(TorchDispatchMode):
    """Tensors turned into Python numbers, counted below every Python wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


def host_reads(step: Callable[[], object]) -> int:
    """In one call; tolist() reads memory at once, and is counted next to what dispatch sees."""
    original, lists = Tensor.tolist, []
    Tensor.tolist = lambda self: lists.append(1) or original(self)  # type: ignore[method-assign]
    try:
        with Reads() as reads:
            step()
    finally:
        Tensor.tolist = original  # type: ignore[method-assign]
    return len(lists) + reads.count


def show(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{of} rounds", end="" if done < of else "\n", file=sys.stderr, flush=True)


def measure(made: Made, pairs: int) -> dict[str, Any]:
    arms = {
        "none": made.alone(),
        "aa": made.alone(),
        "watch": made.guarded("watch"),
        "repair": made.guarded("repair"),
        "sampled": made.sampled(),
    }
    for step in arms.values():
        for _ in range(3):
            step()
    reads = {name: host_reads(arms[name]) for name in ("none", "watch", "repair", "sampled")}
    ratios = clock.measure_time_ratios(arms, baseline="none", pairs=pairs, progress=show)
    step_seconds = clock.measure_call_seconds(arms["none"], 3)
    arms.clear()
    copy = made.copying() / step_seconds
    r = {name: ratio.median for name, ratio in ratios.items()}
    sample = max(0.0, r["sampled"] - r["watch"])
    return {
        "step_seconds": step_seconds,
        **{name: asdict(ratio) for name, ratio in ratios.items()},
        "sample_share_of_a_step": sample,
        "copy_share_of_a_step": copy,
        "watch_in_all": r["watch"] + sample / EVERY,
        "repair_in_all": r["repair"] + sample / EVERY + copy / KEEP_EVERY,
        "host_reads": reads,
    }


def page(found: dict[str, Any]) -> str:
    lines = [f"a step without guards: {found['step_seconds']:.3f} s"]
    for name in ("aa", "watch", "repair", "sampled"):
        ratio = found[name]
        lines.append(
            f"{name:>8}: {ratio['median']:.4f} (10th to 90th percentile {ratio['low']:.4f} to {ratio['high']:.4f}, "
            f"{ratio['pairs']} pairs, {ratio['added_seconds'] * 1e3:+.2f} ms a step)"
        )
    lines.append(
        f"now and then: a sampled step {found['sample_share_of_a_step']:+.1%} (one in {EVERY}), "
        f"a copy in memory {found['copy_share_of_a_step']:+.1%} (one in {KEEP_EVERY}, repair only)"
    )
    lines.append(f"in all: watch {found['watch_in_all']:.4f}, repair {found['repair_in_all']:.4f}")
    guards = max(found["watch_in_all"], found["repair_in_all"])
    reads = found["host_reads"]
    guarded = max(reads[name] for name in reads if name != "none")
    lines.append(f"resnet50 guards={guards:.4f} aa={found['aa']['median']:.4f} host_reads={guarded}/{reads['none']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    here = collect_conditions("cpu")
    command = " ".join(["python", "benchmarks/guard_cost.py", *sys.argv[1:]])
    about = {"command": command, "model": f"resnet50, batch {given.batch}, {given.size}x{given.size}, channels_last"}
    found = {**about, "conditions": here, **measure(Made(given.batch, given.size), given.pairs)}
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    if given.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{about['model']}; {describe_conditions(here)}")
    if describe_load_problem(here):
        print(describe_load_problem(here))
    print(page(found))


if __name__ == "__main__":
    main()
