"""What a step costs beside the same step written by hand, and beside what two popular wrappers add.

    python benchmarks/step_overhead.py [--pairs 100] [--calls 100] [--json] [--profile]

A bf16 step of a model so small that almost nothing but overhead is left: Linear 32-64-10, batch 16, fused AdamW.
Clipping by norm, a schedule and an average of the weights are in every arm, written as leanly as each arm allows.
halfstep's arm also checks the loss and every gradient, keeps buffers and generator state for a rollback, and reports;
`guarded` has a Guardian in repair mode round it, with all alarms and meters, which look at one step in 50 and copy the
run in memory once in 100: as many calls as that are timed together. The others guard nothing. Ratios are medians over
interleaved pairs; `aa` is the hand-written loop against itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import clock
from halfstep.guard.guardian import Guardian
from halfstep.guard.meters.meters import Meters
from halfstep.precision.flags import read_flags

CLIP, DECAY = 1.0, 0.999
Batch = tuple[Tensor, Tensor]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, schedule, (torch.randn(16, 32), torch.randint(0, 10, (16,)))


def average_by_hand(model: nn.Module) -> Callable[[], None]:
    parameters = list(model.parameters())
    averages = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update() -> None:
        torch._foreach_lerp_(averages, parameters, 1.0 - DECAY)

    return update


def bare() -> Callable[[], object]:
    model, optimizer, schedule, (x, y) = parts()
    parameters, average = list(model.parameters()), average_by_hand(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        average()
        optimizer.zero_grad(set_to_none=True)

    return step


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def stepper_and_batch() -> tuple[halfstep.Stepper, Batch]:
    model, optimizer, schedule, batch = parts()
    stepper = halfstep.Stepper(
        model, optimizer, precision="bf16", clip_norm=CLIP, schedule=schedule, ema=halfstep.Ema(model, DECAY)
    )
    return stepper, batch


def with_halfstep() -> Callable[[], object]:
    stepper, batch = stepper_and_batch()
    return lambda: stepper.step(loss_fn, batch)


def with_guards() -> Callable[[], object]:
    stepper, batch = stepper_and_batch()
    guardian = Guardian(stepper, mode="repair", meters=Meters(stepper))
    return lambda: guardian.step(loss_fn, batch)


def with_fabric() -> Callable[[], object]:
    from lightning.fabric import Fabric

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed", devices=1)
    model, optimizer, schedule, (x, y) = parts()
    average = average_by_hand(model)
    model, optimizer = fabric.setup(model, optimizer)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        schedule.step()
        average()
        optimizer.zero_grad(set_to_none=True)

    return step


def with_accelerate() -> Callable[[], object]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, schedule, (x, y) = parts()
    average = average_by_hand(model)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        average()
        optimizer.zero_grad(set_to_none=True)

    return step


ARMS = {
    "bare": bare,
    "aa": bare,
    "halfstep": with_halfstep,
    "guarded": with_guards,
    "fabric": with_fabric,
    "accelerate": with_accelerate,
}


def conditions() -> str:
    return (
        f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"flags {read_flags()}"
    )


def show(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{of} rounds", end="" if done < of else "\n", file=sys.stderr, flush=True)


def profile() -> None:
    """Where the microseconds of the guarded arm go."""
    import cProfile
    import pstats

    step = with_guards()
    for _ in range(500):
        step()
    with cProfile.Profile() as profiler:
        for _ in range(5000):
            step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=100)
    options.add_argument("--calls", type=int, default=100)
    options.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    options.add_argument("--json", action="store_true")
    options.add_argument("--profile", action="store_true")
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    if chosen.profile:
        profile()
        return
    arms = {name: make() for name, make in ARMS.items()}
    for arm in arms.values():
        clock.seconds(arm, 200)
    measured = clock.ratios(arms, baseline="bare", pairs=chosen.pairs, calls=chosen.calls, progress=show)
    bare_us = clock.seconds(arms["bare"], 1000) * 1e6
    if chosen.json:
        figures = {name: {k: round(v, 6) for k, v in asdict(ratio).items()} for name, ratio in measured.items()}
        command = " ".join(["python", "benchmarks/step_overhead.py", *sys.argv[1:]])
        about = {"command": command, "conditions": conditions(), "bare_us": round(bare_us, 1)}
        print(json.dumps({**about, **figures}, indent=1))
        return
    print(conditions())
    print(f"bare step {bare_us:.0f} us; {chosen.pairs} interleaved rounds of {chosen.calls} calls")
    for name, ratio in measured.items():
        added = ratio.added_seconds * 1e6
        print(f"{name:11s} {ratio.median:.3f}  (10-90 %: {ratio.low:.3f}-{ratio.high:.3f})  {added:+.1f} us a step")
    r = {name: ratio.median for name, ratio in measured.items()}
    print(
        f"halfstep={r['halfstep']:.3f} fabric={r['fabric']:.3f} accelerate={r['accelerate']:.3f} aa={r['aa']:.3f} "
        f"added_us={measured['halfstep'].added_seconds * 1e6:.1f} guarded={r['guarded']:.3f}"
    )


if __name__ == "__main__":
    main()
