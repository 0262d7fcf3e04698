"""What the trainer costs next to a bare loop with the same settings and data.

    python benchmarks/train_overhead.py [--pairs 60] [--size 224] [--precision bf16] [--json]
    python benchmarks/train_overhead.py --against CHECKOUT [--pairs 120] [--size 224] [--precision bf16] [--json]

ResNet-50, batch 16, 224², bf16 (`--precision fp32` runs on every CPU), channels_last, fused AdamW, clipping by norm, a
schedule. The samples lie in memory, so that reading them hides nothing, and both arms collate them with torch's
DataLoader in the training process. The trainer's step is all of it: loader, transaction, journal, train.log, console
lines, telemetry and curves. The bare loop guards, measures and writes nothing. Ratios are medians over interleaved
pairs; `aa` is the bare loop against itself.

`--against` times the trainer's step with the code of this checkout and of another one, in turns: see against.py. `aa`
is the other checkout against itself.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import against
import timm
import torch
import torch.nn.functional as F
from in_memory import InMemory, Memory, steps
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from halfstep import clock
from halfstep.journal.events import Journal
from halfstep.journal.listeners import create_listeners
from halfstep.precision.flags import create_fp32_scope, read_fp32_flags
from halfstep.recipe.resolve import resolve_recipe
from halfstep.train.run import make_loop

BATCH, SAMPLES, CLASSES, CLIP, LR = 16, 64, 100, 1.0, 1e-4


def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet50", num_classes=CLASSES)


def memory_of(size: int) -> Memory:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, size, size, generator=generator)
    return Memory(image=images, label=torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


class Images(InMemory):
    def model(self) -> nn.Module:
        return model()

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        return F.cross_entropy(model(batch["image"]), batch["label"])


def bare(memory: Memory, precision: str) -> Callable[[], object]:
    net = model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), LR, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parameters = list(net.parameters())
    loader = DataLoader(memory, batch_size=BATCH, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        batch = next(batches)
        images = batch["image"].contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(net(images), batch["label"])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trainer(memory: Memory, folder: Path, precision: str) -> Callable[[], object]:
    Images.memory = memory
    raw = {
        "task": "in memory",
        "precision": precision,
        "optimizer": {"lr": LR},
        "schedule": {"name": "constant"},
        "train": {"steps": 10**6, "batch_size": BATCH, "clip_norm": CLIP, "num_workers": 0, "seed": 0, "device": "cpu"},
    }
    recipe = resolve_recipe(raw, Images.schema, (), "overhead").recipe
    console = Console(file=io.StringIO())
    loop = make_loop(Images(recipe), recipe, folder, Journal(create_listeners(folder, tracker="none", console=console)))
    if (took := loop.parts.choice.precision.name) != precision:
        raise SystemExit(
            f"this machine would train in {took}, and the bare loop in {precision}: that compares two precisions; "
            "add --precision fp32"
        )
    loop.model.train()
    return steps(loop).__next__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help="default: 60, and 120 with --against (24 for steps over 5 s)")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with the code of another checkout")
    parser.add_argument(against.WORKER, dest="is_worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.against:
        compare(given)
        return
    memory, precision = memory_of(given.size), given.precision
    with tempfile.TemporaryDirectory() as folder, create_fp32_scope("ieee", torch.device("cpu")):
        if given.is_worker:
            against.answer({"trainer": lambda: trainer(memory, Path(folder), precision)})
            return
        arms = {name: bare(memory, precision) for name in ("bare", "aa")}
        arms["halfstep"] = trainer(memory, Path(folder), precision)
        for step in arms.values():
            for _ in range(3):
                step()
        found = clock.measure_time_ratios(arms, baseline="bare", pairs=given.pairs or 60, progress=show)
    about = conditions(given)
    if given.json:
        print(json.dumps({"conditions": about, **{name: asdict(ratio) for name, ratio in found.items()}}, indent=1))
        return
    print(about)
    for name, ratio in found.items():
        print(
            f"{name:>9}: {ratio.median:.4f} (10th to 90th percentile {ratio.low:.4f} to {ratio.high:.4f}, "
            f"{ratio.pairs} pairs, {ratio.added_seconds * 1e3:+.2f} ms a step)"
        )
    print(f"halfstep={found['halfstep'].median:.4f} aa={found['aa'].median:.4f}")


def compare(given: argparse.Namespace) -> None:
    """Compare the trainer of this checkout with that of another one."""
    options = ["--size", str(given.size), "--precision", given.precision]
    found = against.compare(__file__, given.against, {"trainer": 1}, given.pairs, options)
    if given.json:
        print(json.dumps({"conditions": conditions(given), **against.as_dict(found)}, indent=1))
        return
    print(against.in_one_line(found))


def conditions(given: argparse.Namespace) -> str:
    return (
        f"ResNet-50, batch {BATCH}, {given.size}x{given.size}, {given.precision}, channels_last; "
        f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"flags {read_fp32_flags()}"
    )


def show(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{of} rounds", end="" if done < of else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
