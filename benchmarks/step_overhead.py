"""What a step costs next to the same step written by hand, and next to what two popular wrappers add.

    python benchmarks/step_overhead.py [--pairs 100] [--calls 100] [--json] [--record] [--profile [ARM]]
    python benchmarks/step_overhead.py --against CHECKOUT [--pairs 120] [--calls 100] [--json]
    python benchmarks/step_overhead.py --cold [ARM ...] [--pairs 200] [--threads 1] [--json]

A bf16 step of a model so small that almost nothing but overhead is left: Linear 32-64-10, batch 16, fused AdamW.
Clipping by norm, a schedule and an average of the weights are in every arm, written as leanly as each arm allows.
halfstep's arm also checks the loss and every gradient, keeps buffers and generator state for a rollback, and reports;
`guarded` has a Guardian in repair mode round it, with all alarms and meters, which look at one step in 50 and copy the
run in memory once in 100: as many calls as that are timed together. The others guard nothing.

Four more models, each next to its own hand-written loop, which clips, schedules and averages as well:
`masks`: a GPT of 12 layers with 24 causal masks of 1024 x 1024 as buffers, 12 of them bool and 12 fp32, 64 tokens at a
time; `two_optimizers`: Muon and AdamW with one loss and one clip, on matrices, embeddings and norms; `tensors2000`:
1,000 small Linears, so that everything that is counted by tensor shows; `frozen_base`: 100 million frozen parameters
under a trained head, of which nothing may be copied (`frozen_copied` counts the bytes that a step copies beyond those
of the loop by hand). Ratios are medians over interleaved pairs; `aa` is a hand-written loop against itself.

Rows of models whose tensors are so small that little but Python is left, each with fused AdamW: `resnet_shape` has the
178 modules, 161 parameters and 159 buffers of ResNet-50, `transformer_shape` 309 modules and 614 tensors. These and
the tiny model are timed cold as well (`cold_...`): single steps of all arms in turns, by the CPU time of the thread, so
that every step finds its caches used by others, as after a data loader. The excess is about a quarter higher there.
`observed_...` is the time of an observed step over a plain one: of the first step, and of a later one; and what all of
them add to a run of 100 and of 10,000 updates, in plain steps. `start_check_...` is what `check=True` adds. The counts
say what one step executes (see step_counts.py), which no other load changes. `--cold` prints these alone.

`--against` times halfstep's own arms with the code of this checkout and of another one, in turns: see against.py. `aa`
is the other checkout against itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import against
import torch
import torch.nn.functional as F
from step_counts import (
    CLIP,
    DECAY,
    KINDS,
    SHAPES,
    average_by_hand,
    build_parts,
    build_step_by_hand,
    build_stepper,
    compute_loss,
    count_step,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import clock
from halfstep.observe.precision_check import MOST_SECONDS, MOST_STEPS
from halfstep.precision.flags import read_fp32_flags
from halfstep.precision.precision import resolve_precision_name

# As an object: a CPU without bf16 instructions emulates it in every arm, and none of them falls to fp32.
BF16 = resolve_precision_name("bf16")
parts = partial(build_parts, "tiny")


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


# -- other models, each next to its own loop by hand ------------------------------------------------------------------

Optimizers = dict[str, torch.optim.Optimizer]


class MaskedBlock(nn.Module):
    """Attention with its causal mask as a buffer, and an MLP with another one for what it may see."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        triangle = torch.tril(torch.ones(context, context))
        self.register_buffer("bias", triangle.bool())
        self.register_buffer("decay", triangle.clone())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = (q @ k.transpose(1, 2) / 16).masked_fill(~self.bias[:length, :length], -1e9).softmax(-1)
        x = x + self.out((seen * self.decay[:length, :length]).to(v.dtype) @ v)
        return x + self.mlp(x)


class MaskedGPT(nn.Module):
    def __init__(self, layers: int = 12, width: int = 256, context: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.Sequential(*[MaskedBlock(width, context) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def one_optimizer(model: nn.Module) -> Optimizers:
    return {"loss": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)}


def muon_and_adamw(model: nn.Module) -> Optimizers:
    blocks = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    known = set(map(id, blocks))
    rest = [p for p in model.parameters() if id(p) not in known]
    return {"muon": torch.optim.Muon(blocks, 1e-4), "adamw": torch.optim.AdamW(rest, 1e-4)}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(512, 128), nn.LayerNorm(128), nn.Linear(128, 512)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(1000)])


class FrozenBase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(24)]).requires_grad_(False)
        self.head = nn.Linear(2048, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


Model = tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizers], Callable[..., Tensor], Callable[[], Tensor]]
MODELS: dict[str, Model] = {
    "masks": (MaskedGPT, one_optimizer, next_token, lambda: torch.randint(512, (2, 64))),
    "two_optimizers": (Tokens, muon_and_adamw, next_token, lambda: torch.randint(512, (16, 64))),
    "tensors2000": (deep, one_optimizer, square, lambda: torch.randn(4, 8)),
    "frozen_base": (FrozenBase, one_optimizer, square, lambda: torch.randn(16, 2048)),
}


def built(name: str) -> tuple[nn.Module, Optimizers, dict[str, Any], Callable[..., Tensor], Tensor]:
    make, optimizers_of, loss, batch = MODELS[name]
    torch.manual_seed(0)
    model = make()
    optimizers = optimizers_of(model)
    schedules = {key: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0) for key, o in optimizers.items()}
    return model, optimizers, schedules, loss, batch()


def by_hand(name: str) -> Callable[[], object]:
    model, optimizers, schedules, loss_fn, batch = built(name)
    parameters, average = list(model.parameters()), average_by_hand(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for optimizer in optimizers.values():
            optimizer.step()
        for schedule in schedules.values():
            schedule.step()
        average()
        for optimizer in optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    return step


def stepped(name: str) -> Callable[[], object]:
    model, optimizers, schedules, loss_fn, batch = built(name)
    average = halfstep.Ema(model, DECAY)
    stepper = halfstep.Stepper(model, optimizers, precision=BF16, clip_norm=CLIP, schedule=schedules, ema=average)
    return lambda: stepper.step(loss_fn, batch)


SHAPED = [shape for shape in SHAPES if shape != "tiny"]


def measured_shapes(pairs: int) -> dict[str, clock.TimeRatio]:
    """The models of many small tensors, next to their own loops."""
    found: dict[str, clock.TimeRatio] = {}
    for shape in SHAPED:
        arms = {"bare": KINDS["bare"](shape), "aa": KINDS["bare"](shape), shape: KINDS["halfstep"](shape)}
        for arm in arms.values():
            clock.measure_call_seconds(arm, WARM)
        both = clock.measure_time_ratios(arms, baseline="bare", pairs=pairs, progress=show)
        found |= {shape: both[shape], f"{shape}_aa": both["aa"]}
    return found


WARM = 24
"""Steps before a step is a steady one."""


def seconds_of_cpu(step: Callable[[], object]) -> float:
    """The CPU seconds that this thread needs for one step."""
    began = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - began) / 1e9


def measured_cold(shape: str, rounds: int) -> dict[str, clock.TimeRatio]:
    """Single steps of all arms in turns, by CPU time: each finds caches that the others have used."""
    arms = {name: make(shape) for name, make in (*KINDS.items(), ("aa", KINDS["bare"]))}
    for arm in arms.values():
        clock.measure_call_seconds(arm, WARM)
    gc.collect()
    gc.freeze()
    timers = {name: partial(seconds_of_cpu, arm) for name, arm in arms.items()}
    times = list(clock.iterate_interleaved_times(timers, rounds))
    gc.unfreeze()
    base = [each["bare"] for each in times]
    return {
        f"cold_{shape}_{name}": clock.compare_paired_times([each[name] for each in times], base)
        for name in arms
        if name != "bare"
    }


def measured_observed(shape: str) -> dict[str, float]:
    """The CPU time, in plain steps, of observed steps, of all of them in a run, and of the start check."""
    clock.measure_call_seconds(KINDS["halfstep"]("tiny"), 2)  # modules that torch loads at its first step
    first, plain, later, checked = [], [], [], []
    for _ in range(3):
        stepper, batch = build_stepper(shape, check=True)
        checked.append(seconds_of_cpu(partial(stepper.step, compute_loss, batch)))
        stepper, batch = build_stepper(shape)
        step = partial(stepper.step, compute_loss, batch)
        first.append(seconds_of_cpu(step))
        plain += [seconds_of_cpu(step) for _ in range(8)][2:]
        stepper._look_again()
        later.append(seconds_of_cpu(step))
    one, again, check = (statistics.median(times) / statistics.median(plain) for times in (first, later, checked))
    # After updates 10, 100 and 1,000; the tenth is left out where it costs much, see ObservationCost.
    tenth = one <= MOST_STEPS or statistics.median(first) <= MOST_SECONDS
    return {
        f"observed_{shape}_first": round(one, 2),
        f"observed_{shape}_later": round(again, 2),
        f"observed_{shape}_in_100_updates": round(one - 1 + tenth * (again - 1), 2),
        f"observed_{shape}_in_10000_updates": round(one - 1 + (2 + tenth) * (again - 1), 2),
        f"start_check_{shape}": round(check - one, 2),
    }


def counted_steps() -> dict[str, dict[str, int]]:
    """What one step of each arm executes."""
    found = {}
    for shape in SHAPES:
        for kind, make in KINDS.items():
            work = count_step(make(shape))
            found[f"{shape}_{kind}"] = {"calls": work.whole.calls, "bytecodes": work.whole.bytecodes}
    return found


def measured_models(pairs: int) -> dict[str, clock.TimeRatio]:
    """Each of the other models next to its own loop, and that loop next to itself."""
    found: dict[str, clock.TimeRatio] = {}
    for name in MODELS:
        arms = {"bare": by_hand(name), "aa": by_hand(name), name: stepped(name)}
        for arm in arms.values():
            clock.measure_call_seconds(arm, 3)
        both = clock.measure_time_ratios(arms, baseline="bare", pairs=pairs, progress=show)
        found |= {name: both[name], f"{name}_aa": both["aa"]}
    return found


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that are copied or cloned; casts, which autocast makes in every arm, are neither."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten._foreach_copy_):
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.total += sum(tensor.nbytes for tensor in targets)
        return func(*args, **(kwargs or {}))


def frozen_copied() -> int:
    """The bytes that a step over a frozen base copies, beyond those of the loop by hand."""
    found = []
    for step in (stepped("frozen_base"), by_hand("frozen_base")):
        clock.measure_call_seconds(step, 3)
        with CopiedBytes() as counted:
            step()
        found.append(counted.total)
    return found[0] - found[1]


ARMS: dict[str, Callable[[], Callable[[], object]]] = {
    "bare": partial(build_step_by_hand, "tiny"),
    "aa": partial(build_step_by_hand, "tiny"),
    "halfstep": partial(KINDS["halfstep"], "tiny"),
    "guarded": partial(KINDS["guarded"], "tiny"),
    "fabric": with_fabric,
    "accelerate": with_accelerate,
}


COMPARED = {
    **{name: ARMS[name] for name in ("halfstep", "guarded")},
    **{name: partial(stepped, name) for name in MODELS},
    **{shape: partial(KINDS["halfstep"], shape) for shape in SHAPED},
}
"""The arms that another checkout has too."""


def compare(chosen: argparse.Namespace) -> None:
    """Compare the steps of this checkout with those of another one."""
    calls = {arm: chosen.calls if arm in ARMS else 1 for arm in COMPARED}
    threads = ["--threads", str(chosen.threads)] if chosen.threads else []
    found = against.compare(__file__, chosen.against, calls, chosen.pairs, threads)
    if chosen.json:
        print(json.dumps({"conditions": conditions(), **against.as_dict(found)}, indent=1))
        return
    print(against.in_one_line(found))


def conditions() -> str:
    return (
        f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"flags {read_fp32_flags()}"
    )


def show(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{of} rounds", end="" if done < of else "\n", file=sys.stderr, flush=True)


def profile(arm: str) -> None:
    """Show where the time of an arm goes."""
    import cProfile
    import pstats

    step, calls = (stepped(arm), 30) if arm in MODELS else (ARMS[arm](), 5000)
    for _ in range(calls // 10):
        step()
    with cProfile.Profile() as profiler:
        for _ in range(calls):
            step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def print_ratios(measured: Mapping[str, clock.TimeRatio]) -> None:
    for name, ratio in measured.items():
        added = ratio.added_seconds * 1e6
        print(f"{name:31s} {ratio.median:.3f}  (10-90 %: {ratio.low:.3f}-{ratio.high:.3f})  {added:+.1f} us a step")


def print_observed(observed: Mapping[str, float]) -> None:
    for name, ratio in observed.items():
        print(f"{name:31s} {ratio:.1f} plain steps")


def print_counts(counts: Mapping[str, Mapping[str, int]]) -> None:
    for name, work in counts.items():
        print(f"{name:31s} {work['calls']} calls of Python functions, {work['bytecodes']} bytecodes a step")


def print_cold(shapes: Sequence[str], rounds: int, as_json: bool) -> None:
    """Print the figures that need no idle machine."""
    measured = {name: ratio for shape in shapes for name, ratio in measured_cold(shape, rounds).items()}
    observed = {name: ratio for shape in shapes for name, ratio in measured_observed(shape).items()}
    counts = {name: work for name, work in counted_steps().items() if name.rpartition("_")[0] in shapes}
    if as_json:
        print(json.dumps({**{k: asdict(v) for k, v in measured.items()}, **observed, "counts": counts}, indent=1))
        return
    print(conditions())
    print_ratios(measured)
    print_observed(observed)
    print_counts(counts)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, help="default: 100, and 120 with --against (24 for steps over 5 s)")
    options.add_argument("--calls", type=int, default=100)
    options.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with the code of another checkout")
    options.add_argument(against.WORKER, dest="is_worker", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    options.add_argument("--cold", nargs="*", choices=list(SHAPES), metavar="ARM", help="cold steps and counts alone")
    options.add_argument("--json", action="store_true")
    options.add_argument("--record", action="store_true", help="keep the figures in step_overhead.json")
    options.add_argument("--profile", nargs="?", const="guarded", choices=[*ARMS, *MODELS], metavar="ARM")
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    if chosen.profile:
        profile(chosen.profile)
        return
    if chosen.is_worker:
        against.answer(COMPARED)
        return
    if chosen.against:
        compare(chosen)
        return
    if chosen.cold is not None:
        print_cold(chosen.cold or list(SHAPES), chosen.pairs or 200, chosen.json)
        return
    chosen.pairs = chosen.pairs or 100
    arms = {name: make() for name, make in ARMS.items()}
    for arm in arms.values():
        clock.measure_call_seconds(arm, 200)
    measured = clock.measure_time_ratios(arms, baseline="bare", pairs=chosen.pairs, calls=chosen.calls, progress=show)
    measured |= measured_models(chosen.pairs) | measured_shapes(chosen.pairs)
    for shape in SHAPES:
        measured |= measured_cold(shape, chosen.pairs)
    observed = {name: ratio for shape in SHAPES for name, ratio in measured_observed(shape).items()}
    counts = counted_steps()
    copied, bare_us = frozen_copied(), clock.measure_call_seconds(arms["bare"], 1000) * 1e6
    if chosen.json or chosen.record:
        figures = {name: {k: round(v, 6) for k, v in asdict(ratio).items()} for name, ratio in measured.items()}
        command = " ".join(["python", "benchmarks/step_overhead.py", *sys.argv[1:]])
        about = {"command": command, "conditions": conditions(), "bare_us": round(bare_us, 1), "frozen_copied": copied}
        text = json.dumps({**about, **figures, **observed, "counts": counts}, indent=1)
        if chosen.record:
            Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        if chosen.json:
            print(text)
            return
    print(conditions())
    print(f"bare step {bare_us:.0f} us; {chosen.pairs} interleaved rounds of {chosen.calls} calls")
    print_ratios(measured)
    print_observed(observed)
    print_counts(counts)
    r = {name: ratio.median for name, ratio in measured.items()}
    print(
        f"halfstep={r['halfstep']:.3f} fabric={r['fabric']:.3f} accelerate={r['accelerate']:.3f} aa={r['aa']:.3f} "
        f"added_us={measured['halfstep'].added_seconds * 1e6:.1f} guarded={r['guarded']:.3f} masks={r['masks']:.3f} "
        f"two_optimizers={r['two_optimizers']:.3f} tensors2000={r['tensors2000']:.3f} "
        f"frozen_base={r['frozen_base']:.3f} frozen_copied={copied} resnet_shape={r['resnet_shape']:.3f} "
        f"transformer_shape={r['transformer_shape']:.3f}"
    )


if __name__ == "__main__":
    main()
