"""Eight ways to get no speed-up, and two that get one: does `profile` name each, from measurements alone?

    python benchmarks/profile_situations.py [--seconds 8] [--json] [--record]

Each situation is a case of its own, which can be profiled by hand too:

    halfstep profile benchmarks.profile_situations:too_few_workers

`--record` keeps the result in benchmarks/profile_situations.json. The last line is `named=8/8` if all were.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from halfstep import island

CLASSES = 16
Case = tuple[nn.Module, Any, Any]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Far(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take their time to come, as from a far-away disk. No core is busy meanwhile."""

    def __init__(self, seconds: float, width: int = 256) -> None:
        self.seconds, self.width = seconds, width

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        self.prepare()
        return torch.full((self.width,), number / 4096), torch.tensor(number % CLASSES)

    def prepare(self) -> None:
        time.sleep(self.seconds)


class Laborious(Far):
    """Samples that take this long to compute, as large pictures do that are decoded."""

    def prepare(self) -> None:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass


def _perceptron(width: int, depth: int = 4, inward: int | None = None) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inward or width, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def _labelled(images: Tensor) -> tuple[Tensor, Tensor]:
    return images, torch.randint(0, CLASSES, (images.shape[0],))


def slow_dataset() -> Case:
    """A sample takes a core 20 ms, a batch 320 ms: all cores of a workstation could not keep up."""
    return _perceptron(256), loss_fn, DataLoader(Laborious(0.02), batch_size=16)


def too_few_workers() -> Case:
    """Reading takes about as long as computing, one after the other, and is mostly waiting: workers would hide it."""
    model = _perceptron(1024, depth=8, inward=256)
    return model, loss_fn, DataLoader(Far(0.0003), batch_size=64)


def tiny_model() -> Case:
    """A few thousand multiplications a step."""
    return _perceptron(16), loss_fn, _labelled(torch.randn(4, 16))


def misaligned_channels() -> Case:
    """Convolutions of 255 channels, one fewer than a multiple of 8, which take long strides."""
    width = 255
    model = nn.Sequential(
        nn.Conv2d(16, width, 1), nn.Conv2d(width, width, 3, stride=4, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES),
    )  # fmt: skip
    images = torch.randn(32, 16, 28, 28).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), loss_fn, _labelled(images)  # type: ignore[call-overload]


def fp32_island() -> Case:
    """Nearly all of the model was put on an island."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), _perceptron(1024, depth=6))
    return island(model, "2"), loss_fn, _labelled(torch.randn(256, 1024))


def tf32_baseline() -> Case:
    """Somebody has allowed torch to multiply fp32 in a faster format."""
    torch.set_float32_matmul_precision("medium")
    return _perceptron(1024, depth=6), loss_fn, _labelled(torch.randn(256, 1024))


def half_convolutions() -> Case:
    """fp16 on a CPU, which has no kernel for the backward of its convolutions."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip
    return model, loss_fn, _labelled(torch.randn(4, 16, 16, 16))


class Counting(nn.Module):
    """Counts its calls in a number that the compiler takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _perceptron(128)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers(images)
        return out * (1 + self.calls * 1e-6)


def recompiling() -> Case:
    """Compiled anew in each step."""
    model = torch.compile(Counting(), backend="aot_eager", dynamic=False)
    return model, loss_fn, _labelled(torch.randn(32, 128))  # type: ignore[return-value]


def healthy_perceptron() -> Case:
    """Large products, data in memory."""
    return _perceptron(1024, depth=6), loss_fn, _labelled(torch.randn(512, 1024))


def healthy_network() -> Case:
    """Convolutions of 64 channels, data in memory."""
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    images = torch.randn(16, 64, 28, 28).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), loss_fn, _labelled(images)  # type: ignore[call-overload]


SITUATIONS = {
    "slow_dataset": ("slow-data", "bf16"),
    "too_few_workers": ("too-few-workers", "bf16"),
    "tiny_model": ("tiny-model", "bf16"),
    "misaligned_channels": ("misaligned-channels", "bf16"),
    "fp32_island": ("fp32-island", "bf16"),
    "tf32_baseline": ("tf32-baseline", "bf16"),
    "half_convolutions": ("reference-kernels", "fp16"),
    "recompiling": ("recompiling", "bf16"),
}
CONTROLS = {"healthy_perceptron": ("already-fast", "bf16"), "healthy_network": ("already-fast", "bf16")}


def examine(name: str, expected: str, precision: str, seconds: float) -> dict[str, Any]:
    """Profile one of them in a process of its own; what is expected is not told to it."""
    from halfstep.measure.profile.profile import profile
    from halfstep.measure.subject import Subject

    start = time.perf_counter()
    found = profile(Subject(f"benchmarks.profile_situations:{name}"), precision=precision, seconds=seconds)
    race = found.facts.race
    return {
        "situation": name,
        "precision": precision,
        "expected": expected,
        "named": found.cause.id,
        "share": round(found.cause.share, 3),
        "speedup": round(race.speedup, 3) if race else None,
        "sentence": found.cause.sentence,
        "evidence": found.cause.evidence,
        "others": [cause.id for cause in found.others],
        "seconds": round(time.perf_counter() - start, 1),
        "conditions": dict(found.conditions),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=8.0, help="about how long to measure each")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--record", action="store_true", help="keep the result next to this file")
    options.add_argument("names", nargs="*", help="only these")
    given = options.parse_args()
    rows = []
    for name, (expected, precision) in {**SITUATIONS, **CONTROLS}.items():
        if given.names and name not in given.names:
            continue
        row = examine(name, expected, precision, given.seconds)
        rows.append(row)
        print(_line(row), file=sys.stderr if given.json else sys.stdout, flush=True)
    named = [row["named"] == row["expected"] for row in rows if row["situation"] in SITUATIONS]
    controls = [row["named"] == row["expected"] for row in rows if row["situation"] in CONTROLS]
    report = {"named": sum(named), "of": len(named), "healthy": sum(controls), "controls": len(controls), "rows": rows}
    if given.record:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"healthy={sum(controls)}/{len(controls)}")
        print(f"named={sum(named)}/{len(named)}")


def _line(row: dict[str, Any]) -> str:
    right = "ok" if row["named"] == row["expected"] else "NOT"
    speed = f"{row['speedup']:.2f}x" if row["speedup"] else "-"
    return f"{row['situation']:20} {right:4} {row['named']:20} {row['share']:5.0%} {speed:>6} {row['seconds']:5.1f} s"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # so that its cases can be imported by name
    main()
