"""What `estimate` predicts next to what the allocator counts in a real run, for six models that people train.

    python benchmarks/estimate_accuracy.py [--only gpt2] [--json] [--record]

The prediction runs on fake tensors. The run that it is held against shares nothing with it: a plain loop written by
hand here, in a process of its own, with fused AdamW on this machine's CPU; the highest sum of the allocator's own
events (torch.profiler, `profile_memory`) over its second update counts, with what was there before. `within` counts
the cells whose error is at most 3 %. Further models are held out: they have a line of their own before the last one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.measure.memory.ledger import Ledger

WITHIN = 0.03
PRECISIONS = ("fp32", "bf16")
RECORD = Path(__file__).with_suffix(".json")
Parts = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


# -- the models ---------------------------------------------------------------------------------------------------


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def resnet50(size: int) -> Parts:
    import timm

    return timm.create_model("resnet50"), classified, (torch.randn(size, 3, 224, 224), torch.randint(0, 1000, (size,)))


def vit_small(size: int) -> Parts:
    import timm

    images = torch.randn(size, 3, 224, 224)
    return timm.create_model("vit_small_patch16_224"), classified, (images, torch.randint(0, 1000, (size,)))


def segmented(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def smp_unet(size: int) -> Parts:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet34", encoder_weights=None)
    return model, segmented, (torch.randn(size, 3, 256, 256), torch.rand(size, 1, 256, 256))


def classic_unet(size: int) -> Parts:
    from halfstep.tasks.models.unet import UNet

    return UNet(3, 1), segmented, (torch.randn(size, 3, 128, 128), torch.rand(size, 1, 128, 128))


def diffused(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    noisy, when, noise = batch
    return F.mse_loss(model(noisy, when).sample, noise)


def diffusers_unet(size: int) -> Parts:
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=64, block_out_channels=(64, 128, 256, 256))
    image = torch.randn(size, 3, 64, 64)
    return model, diffused, (image, torch.randint(0, 1000, (size,)), torch.randn_like(image))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """As large as the small GPT-2, its head tied to its embedding."""

    def __init__(self, width: int = 768, layers: int = 12, words: int = 50257, context: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gpt2(size: int) -> Parts:
    return Transformer(), next_word, torch.randint(0, 50257, (size, 513))


MODELS: dict[str, tuple[Callable[[int], Parts], tuple[int, int]]] = {
    "resnet50": (resnet50, (4, 8)),
    "smp_unet": (smp_unet, (2, 4)),
    "classic_unet": (classic_unet, (2, 4)),
    "vit_small": (vit_small, (4, 8)),
    "diffusers_unet": (diffusers_unet, (2, 4)),
    "gpt2": (gpt2, (1, 2)),
}


# -- next to the six: held out of the last line; convnext's and the encoder's errors have led to rules since --------


def small_images(name: str, pixels: int, size: int) -> Parts:
    import timm

    images = torch.randn(size, 3, pixels, pixels)
    return timm.create_model(name, num_classes=10), classified, (images, torch.randint(0, 10, (size,)))


def by_channels(name: str, pixels: int, size: int) -> Parts:
    model, loss_fn, (images, labels) = small_images(name, pixels, size)
    model = model.to(memory_format=torch.channels_last)
    return model, loss_fn, (images.contiguous(memory_format=torch.channels_last), labels)


def twice(into: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (into, out):
        layers += [nn.Conv3d(channels, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


class VolumeUNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.top, self.bottom, self.pool = twice(1, width), twice(width, 2 * width), nn.MaxPool3d(2)
        self.up, self.last = nn.ConvTranspose3d(2 * width, width, 2, 2), twice(2 * width, width)
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        bottom = self.up(self.bottom(self.pool(top)))
        out: Tensor = self.head(self.last(torch.cat((bottom, top), 1)))
        return out


def volumes(size: int) -> Parts:
    return VolumeUNet(), classified, (torch.randn(size, 1, 32, 32, 32), torch.randint(0, 2, (size, 32, 32, 32)))


class Words(nn.Module):
    """An embedding, a sequence model, a head."""

    def __init__(self, inside: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.words, self.inside, self.head = nn.Embedding(500, width), inside, nn.Linear(out, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.inside(self.words(tokens))
        out: Tensor = self.head(found[0] if isinstance(found, tuple) else found)
        return out


def encoder(size: int) -> Parts:
    inside = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 4)
    return Words(inside, 128, 128), next_word, torch.randint(0, 500, (size, 129))


def recurrent(kind: type[nn.Module], size: int) -> Parts:
    return Words(kind(64, 128, 2, batch_first=True), 64, 128), next_word, torch.randint(0, 500, (size, 65))


HELD_OUT: dict[str, tuple[Callable[[int], Parts], tuple[int, ...]]] = {
    "convnext_tiny": (partial(small_images, "convnext_tiny", 64), (4,)),
    "mobilenetv3": (partial(small_images, "mobilenetv3_large_100", 96), (8,)),
    "resnet18 by channels": (partial(by_channels, "resnet18", 64), (8,)),
    "unet of volumes": (volumes, (2,)),
    "encoder": (encoder, (8,)),
    "gru": (partial(recurrent, nn.GRU), (16,)),
    "lstm": (partial(recurrent, nn.LSTM), (16,)),
}
ALL: dict[str, tuple[Callable[[int], Parts], tuple[int, ...]]] = {**MODELS, **HELD_OUT}


# -- the truth ----------------------------------------------------------------------------------------------------


def measure(name: str, size: int, precision: str) -> int:
    """The peak of a real second update, in this process."""
    from halfstep.measure.candidate import measure_peak_bytes

    torch.manual_seed(0)
    model, loss_fn, batch = ALL[name][0](size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    update()
    held = [*model.parameters(), *model.buffers(), *(batch if isinstance(batch, tuple) else (batch,))]
    held += [tensor for state in optimizer.state.values() for tensor in state.values()]
    return measure_peak_bytes(update, torch.device("cpu"), held)


def measured_elsewhere(name: str, size: int, precision: str) -> int:
    command = [sys.executable, __file__, "--measure", name, str(size), precision]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


# -- the prediction -----------------------------------------------------------------------------------------------


def predict(name: str, size: int, precision: str) -> Ledger:
    from halfstep.measure.case import build_case
    from halfstep.measure.memory.estimate import estimate_ledger
    from halfstep.measure.setting import StepSetting

    return estimate_ledger(lambda: build_case(*ALL[name][0](size)), StepSetting(precision))


@dataclass(frozen=True)
class Cell:
    model: str
    precision: str
    batch: int
    predicted: int
    measured: int
    seconds: float
    """That the prediction took."""
    verified: bool
    """Whether the ledger itself says so."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return (
            f"{self.model:<20} {self.precision}  {self.batch:>3}  {self.predicted / 2**20:>10.1f}  "
            f"{self.measured / 2**20:>10.1f}  {self.error:>+7.2%}  {self.seconds:>6.1f}"
            f"{'' if self.verified else '  not verified, as its notes say'}"
        )


def cell(name: str, size: int, precision: str) -> Cell:
    begin = time.perf_counter()
    predicted = predict(name, size, precision)
    seconds = round(time.perf_counter() - begin, 2)
    measured = measured_elsewhere(name, size, precision)
    return Cell(name, precision, size, predicted.peak, measured, seconds, predicted.verified)


def show(done: int, of: int, began: float) -> None:
    left = (time.perf_counter() - began) / done * (of - done) if done else float("nan")
    ends = "\r" if sys.stderr.isatty() else "\n"
    print(f"{done}/{of} cells, {left:.0f} s left ", end=ends, file=sys.stderr, flush=True)


def summary(cells: list[Cell]) -> str:
    within = sum(abs(c.error) <= WITHIN for c in cells)
    return f"within={within}/{len(cells)} worst={max((abs(c.error) for c in cells), default=float('nan')):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ALL), action="append", help="these models")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "BATCH", "PRECISION"), help="one run; prints bytes")
    options = parser.parse_args()
    if options.measure:
        name, size, precision = options.measure
        print(measure(name, int(size), precision))
        return
    names = options.only or [*MODELS, *HELD_OUT]
    wanted = [(n, s, p) for n in names for p in PRECISIONS for s in ALL[n][1]]
    found = collect_conditions("cpu")
    if not options.json:
        print(describe_conditions(found))
        print(f"{'model':<20} in    batch  predicted    measured MiB  error  seconds")
    cells: list[Cell] = []
    began = time.perf_counter()
    for which in wanted:
        show(len(cells), len(wanted), began)
        cells.append(cell(*which))
        if not options.json:
            print(cells[-1], flush=True)
    six = [c for c in cells if c.model in MODELS]
    held_out = [c for c in cells if c.model in HELD_OUT]
    report = {
        "command": f"python benchmarks/{Path(__file__).name} --record",
        "conditions": found,
        "seconds": round(time.perf_counter() - began, 1),
        "cells": [{**asdict(c), "error": round(c.error, 5)} for c in six],
        "held_out": [{**asdict(c), "error": round(c.error, 5)} for c in held_out],
        "held_out_summary": summary(held_out),
        "summary": summary(six),
    }
    if options.record:
        RECORD.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1) if options.json else f"held_out {summary(held_out)}\n{summary(six)}")


if __name__ == "__main__":
    main()
