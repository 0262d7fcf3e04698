"""What one step executes, counted instead of timed: the same on an idle machine and on a loaded one.

    python -m benchmarks.step_counts [ARM ...] [--json]

For each arm: calls of Python functions, calls of C functions, bytecodes and operations of torch in one step, of the
whole step and of halfstep's own files. Arms are the models below, by hand, by hand under halfstep.watch, with halfstep
and with a Guardian. The models have the number of modules and tensors of real ones, and tensors so small that little
but Python is left.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.guard.guardian import Guardian
from halfstep.precision.precision import resolve_precision_name

CLIP, DECAY = 1.0, 0.999
OWN = str(Path(halfstep.__file__ or "").parent)
Batch = tuple[Tensor, Tensor]
Step = Callable[[], object]

# -- models -----------------------------------------------------------------------------------------------------------


class ResNetShape(nn.Module):
    """53 linear layers without bias, each with a BatchNorm: 178 modules, 161 parameters, 159 buffers, as ResNet-50."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def unit() -> nn.Module:
            return nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width))

        self.stem, self.head = unit(), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.ModuleList(unit() for _ in range(4 if i % 4 == 0 else 3)) for i in range(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y, (first, second, third, *shortcut) = x, cast(nn.ModuleList, block)
            for each in (first, second, third):
                y = torch.relu(each(y))
            x = (shortcut[0](x) if shortcut else x) + y
        return cast(Tensor, self.head(x))


class _Block(nn.Module):
    """Attention and an MLP, with a mask and a scale as buffers: 9 modules with their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.out, self.mlp_norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.register_buffer("scale", torch.tensor(0.35))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        seen = (self.q(y) @ self.k(y).transpose(1, 2) * self.scale).softmax(-1) * self.mask
        x = x + self.out(seen.to(y.dtype) @ self.v(y).to(y.dtype))
        return x + cast(Tensor, self.down(torch.relu(self.up(self.mlp_norm(x)))))


class TransformerShape(nn.Module):
    """34 blocks: 309 modules, 546 parameters, 68 buffers."""

    def __init__(self, blocks: int = 34, width: int = 8) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(_Block(width) for _ in range(blocks))), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(x)))[:, 0]


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tiny": (_tiny, (16, 32)),
    "resnet_shape": (ResNetShape, (16, 8)),
    "transformer_shape": (TransformerShape, (4, 4, 8)),
}
"""Models, with the shape of their batch."""


class Parts(NamedTuple):
    """What a loop is made of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batch: Batch


def build_parts(shape: str) -> Parts:
    torch.manual_seed(0)
    make, size = SHAPES[shape]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Parts(model, optimizer, schedule, (torch.randn(size), torch.randint(0, 10, size[:1])))


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def average_by_hand(model: nn.Module) -> Callable[[], None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update() -> None:
        torch._foreach_lerp_(averages, parameters, 1.0 - DECAY)

    return update


def build_step_by_hand(shape: str, *, watched: bool = False) -> Step:
    model, optimizer, schedule, (x, y) = build_parts(shape)
    if watched:
        halfstep.watch(model, optimizer)
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


def build_watched_step(shape: str) -> Step:
    return build_step_by_hand(shape, watched=True)


def build_stepper(shape: str, *, check: bool = False) -> tuple[halfstep.Stepper, Batch]:
    model, optimizer, schedule, batch = build_parts(shape)
    average = halfstep.Ema(model, DECAY)
    # As an object: a CPU without bf16 instructions emulates it in every arm, and none of them falls to fp32.
    bf16 = resolve_precision_name("bf16")
    options: dict[str, Any] = {"clip_norm": CLIP, "schedule": schedule, "ema": average, "check": check}
    return halfstep.Stepper(model, optimizer, precision=bf16, **options), batch


def build_plain_step(shape: str) -> Step:
    stepper, batch = build_stepper(shape)
    return lambda: stepper.step(compute_loss, batch)


def build_guarded_step(shape: str) -> Step:
    from halfstep.guard.monitors.monitors import Meters

    stepper, batch = build_stepper(shape)
    guardian = Guardian(stepper, mode="repair", meters=Meters(stepper))
    return lambda: guardian.step(compute_loss, batch)


KINDS = {
    "bare": build_step_by_hand,
    "watched": build_watched_step,
    "halfstep": build_plain_step,
    "guarded": build_guarded_step,
}

# -- counting ---------------------------------------------------------------------------------------------------------


class Executed(NamedTuple):
    """What some code has executed."""

    calls: int
    c_calls: int
    bytecodes: int


class StepWork(NamedTuple):
    """What one step executes: in all, in halfstep's own files, and the operations of torch that it dispatches."""

    whole: Executed
    own: Executed
    operations: int


class _Counter:
    """A trace function that counts calls and bytecodes, and a profile function that counts calls of C functions."""

    def __init__(self) -> None:
        self.calls, self.c_calls, self.bytecodes = [0, 0], [0, 0], [0, 0]

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        own = frame.f_code.co_filename.startswith(OWN)
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self.calls[own] += 1
        elif event == "opcode":
            self.bytecodes[own] += 1
        return self.trace

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "c_call":
            self.c_calls[frame.f_code.co_filename.startswith(OWN)] += 1

    def found(self) -> tuple[Executed, Executed]:
        rest, own = (Executed(*numbers) for numbers in zip(self.calls, self.c_calls, self.bytecodes, strict=True))
        return Executed(*(a + b for a, b in zip(rest, own, strict=True))), own


class _Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def list_operations(step: Step) -> list[str]:
    """Return the names of the operations of torch that a step dispatches, in order."""
    with _Operations() as counted:
        step()
    return counted.names


def count_step(step: Step, after: int = 24, tries: int = 3) -> StepWork:
    """Count one step, a steady one: `after` so many others, the least of some, since guards also work now and then."""
    for _ in range(after):
        step()
    counted = [_count_once(step) for _ in range(tries)]
    whole, own = (Executed(*map(min, zip(*found, strict=True))) for found in zip(*counted, strict=True))
    return StepWork(whole, own, len(list_operations(step)))


def _count_once(step: Step) -> tuple[Executed, Executed]:
    counter, before = _Counter(), (sys.gettrace(), sys.getprofile())
    try:
        sys.settrace(counter.trace)
        step()
        sys.settrace(None)
        sys.setprofile(counter.profile)
        step()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
    return counter.found()


def main() -> None:
    arms = {f"{shape}.{kind}": (shape, kind) for shape in SHAPES for kind in KINDS}
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("arms", nargs="*", metavar="ARM", choices=[*arms, []], help=", ".join(arms))
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    found = {}
    for name in chosen.arms or arms:
        shape, kind = arms[name]
        found[name] = work = count_step(KINDS[kind](shape))
        whole, own = work.whole, work.own
        if not chosen.json:
            print(
                f"{name:26s} calls {whole.calls:6d} c_calls {whole.c_calls:6d} bytecodes {whole.bytecodes:7d} "
                f"own_calls {own.calls:5d} own_c_calls {own.c_calls:5d} own_bytecodes {own.bytecodes:6d} "
                f"operations {work.operations}",
                flush=True,
            )
    if chosen.json:
        plain = {name: {**w._asdict(), "whole": w.whole._asdict(), "own": w.own._asdict()} for name, w in found.items()}
        print(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
