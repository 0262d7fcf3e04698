"""Does the parity verdict tell good precisions from bad ones? Real CIFAR-10, five seeds in pairs, five arms.

    python benchmarks/parity_cifar.py [--seeds 5] [--steps 1000] [--record]

Needs `halfstep data get cifar10` once. Every arm trains the same small CNN on the same pictures in the same order, with
AdamW at 1e-4, on a loss that is small (times 1e-5, which AdamW does not feel). Only the numbers' formats differ:

    fp32            strict, by the Stepper: what the others are compared with
    fp32_again      the same with other seeds: no difference but chance
    bf16            by the Stepper
    bf16_weights    a plain loop with the weights themselves stored in bf16, where small updates round to nothing
    fp16_unscaled   a plain loop with fp16 autocast and no loss scale, where small gradients underflow

The last line has the four verdicts, as `halfstep.measure.parity` gives them. `--record` keeps the figures next to this
file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.data.shards import Shards
from halfstep.files import find_cache_folder
from halfstep.host_memory import keep_freed_memory
from halfstep.measure.bench.bench import run_bench_arms
from halfstep.measure.bench.comparison import BenchMetric, RunResult, smooth_loss_curve
from halfstep.measure.bench.page import Bench
from halfstep.measure.conditions import collect_conditions
from halfstep.precision.precision import disable_onednn_fp16_backward

HERE = Path(__file__).parent
TRAIN, VAL, BATCH = 12_000, 5_000, 32
RATE, SMALL = 1e-4, 1e-5
OTHER_SEEDS = 100
"""How far the seeds of `fp32_again` are from the others."""
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pictures:
    """As many as are used, in memory: bytes, and their classes."""

    train: Batch
    val: Batch


def pictures() -> Pictures:
    folder = find_cache_folder() / "data" / "cifar10"
    if not folder.exists():
        sys.exit(f"there is no {folder}; do: halfstep data get cifar10")
    return Pictures(_read(folder / "train", TRAIN), _read(folder / "val", VAL))


def _read(folder: Path, count: int) -> Batch:
    shards = Shards(folder)
    samples = [shards.read(number) for number in range(count)]
    return torch.stack([sample["image"] for sample in samples]), torch.stack([sample["label"] for sample in samples])


def network() -> nn.Module:
    def block(channels: int, more: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, more, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(more), nn.ReLU()]

    layers = [*block(3, 12), *block(12, 24), *block(24, 48)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * SMALL


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-16)  # smaller than the gradients of so small a loss


Step = Callable[[Batch], float]


def by_stepper(precision: str, model: nn.Module) -> Step:
    stepper = Stepper(model, adamw(model), precision=precision, strict=True)
    return lambda batch: stepper.step(loss_fn, batch).loss


def with_narrow_weights(model: nn.Module) -> Step:
    model.to(torch.bfloat16)
    optimizer = adamw(model)

    def step(batch: Batch) -> float:
        loss = loss_fn(model, (batch[0].bfloat16(), batch[1]))
        return _plain_update(optimizer, loss)

    return step


def without_loss_scale(model: nn.Module) -> Step:
    disable_onednn_fp16_backward(model)
    optimizer = adamw(model)

    def step(batch: Batch) -> float:
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model, batch)
        return _plain_update(optimizer, loss)

    return step


def _plain_update(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(data: Pictures, steps: int, make_step: Callable[[nn.Module], Step], offset: int, seed: int) -> RunResult:
    """One run; the seed decides the weights, the order and the flips, and nothing else does."""
    torch.manual_seed(seed + offset)
    model = network()
    step = make_step(model)
    order = torch.Generator().manual_seed(seed + offset)
    curve: list[tuple[float, float]] = []
    began = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(0, TRAIN, (BATCH,), generator=order)
        flips = torch.rand(BATCH, 1, 1, 1, generator=order) < 0.5
        images = prepared(data.train[0][chosen])
        loss = step((torch.where(flips, images.flip(-1), images), data.train[1][chosen]))
        curve.append((time.perf_counter() - began, loss))
    taken = curve[-1][0]
    smooth = smooth_loss_curve(curve, max(1, steps // 20))
    return RunResult(
        seed, accuracy(model.float(), data.val), taken, samples_per_second=steps * BATCH / taken, curve=smooth
    )


def prepared(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(0.47).div_(0.25)


@torch.no_grad()
def accuracy(model: nn.Module, val: Batch) -> float:
    """Of a network in fp32, whatever it was trained in."""
    model.eval()
    right = sum(
        int((model(prepared(images)).argmax(1) == labels).sum())
        for images, labels in zip(val[0].split(500), val[1].split(500), strict=True)
    )
    return right / len(val[1])


def arms(data: Pictures, steps: int) -> dict[str, Callable[[int], RunResult]]:
    run = partial(train, data, steps)
    return {
        "fp32": partial(run, partial(by_stepper, "fp32"), 0),
        "fp32_again": partial(run, partial(by_stepper, "fp32"), OTHER_SEEDS),
        "bf16": partial(run, partial(by_stepper, "bf16"), 0),
        "bf16_weights": partial(run, with_narrow_weights, 0),
        "fp16_unscaled": partial(run, without_loss_scale, 0),
    }


class Progress:
    """How long the rest will take if it is like what was."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        left = (time.monotonic() - self._began) * (of / done - 1) / 60 if done else None
        told = f", {left:.1f} min left" if left is not None else ""
        end = "\r" if sys.stderr.isatty() and done < of else "\n"
        print(f"{done} of {of} runs{told}   ", end=end, file=sys.stderr, flush=True)


def last_line(bench: Bench) -> str:
    verdicts = {row.name: row.parity.verdict if row.parity else row.failed for row in bench.rows[1:]}
    return " ".join(f"{name}={verdict.replace(' ', '_')}" for name, verdict in verdicts.items())


def recorded(bench: Bench) -> dict[str, Any]:
    """All but the curves of the losses, which are most of it and of which the rows have what is told."""
    found = bench.as_dict()
    for run in (run for row in found["rows"] for run in row["runs"]):
        del run["curve"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--record", action="store_true", help="keep the figures as parity_cifar.json and .md and .png")
    given = parser.parse_args()
    keep_freed_memory()
    told = {"command": " ".join(["python benchmarks/parity_cifar.py", *sys.argv[1:]]), **collect_conditions()}
    told |= {"steps": given.steps, "batch": BATCH, "train": TRAIN, "val": VAL, "seeds of fp32_again": f"+{OTHER_SEEDS}"}
    bench = run_bench_arms(
        arms(pictures(), given.steps),
        name="small CNN on CIFAR-10",
        seeds=range(1, given.seeds + 1),
        metric=BenchMetric("top1", higher_is_better=True),
        conditions=told,
        progress=Progress(),
    )
    under = "; ".join(f"{name} {value}" for name, value in told.items() if name not in ("command", "flags"))
    text = f"`{told['command']}`\n\n{bench.markdown()}\nConditions: {under}.\n\n{last_line(bench)}\n"
    if given.record and not bench.interrupted:
        from halfstep.draw.svg import write_svg
        from halfstep.measure.bench.page import draw_bench_speeds, draw_parity_chart

        (HERE / "parity_cifar.json").write_text(json.dumps(recorded(bench), indent=1) + "\n")
        (HERE / "parity_cifar.md").write_text(text)
        charts = [chart for chart in (draw_bench_speeds(bench), draw_parity_chart(bench)) if chart is not None]
        write_svg(charts, HERE / "parity_cifar.svg", bench.name)
    print(text, end="")


if __name__ == "__main__":
    main()
