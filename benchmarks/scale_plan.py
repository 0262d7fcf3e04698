"""What a step of an 8 B-parameter transformer costs on 8 to 1,024 ranks, counted on this machine without any of them.

    python benchmarks/scale_plan.py [--world 1024] [--json] [--record]

The model is the shape of Llama 3 8B, written with torch's layers; every rank has one sequence of 4,096 tokens. The same
page as for any model: `halfstep estimate benchmarks.scale_plan:llama_8b --world 1024 --nodes 128 --device h100-80gb`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.numbers import format_bytes

RECORD = Path(__file__).with_suffix(".json")
WORLDS = (8, 64, 512, 1024)
DEVICE = "h100-80gb"
WIDTH, BLOCKS, HEADS, GROUPS, HIDDEN, WORDS, TOKENS = 4096, 32, 32, 8, 14336, 128256, 4096


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.each = WIDTH // HEADS
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, GROUPS * self.each, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            part(x).view(batch, tokens, -1, self.each).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (turned(key, turns), value))
        mixed = F.scaled_dot_product_attention(turned(query, turns), key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turns[0].to(x.dtype) + torch.cat((-second, first), -1) * turns[1].to(x.dtype)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm and next to a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.before(x), turns)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The shape of Llama 3 8B."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        each = WIDTH // HEADS
        speeds = 500_000.0 ** (-torch.arange(0, each, 2, device=words.device) / each)
        angles = torch.arange(words.shape[1], device=words.device)[:, None] * torch.cat((speeds, speeds))
        turns = angles.cos(), angles.sin()
        x = self.words(words)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def llama_8b() -> tuple[nn.Module, Any, Tensor]:
    """The case."""
    return Llama(), next_word, torch.randint(0, WORDS, (1, TOKENS + 1))


# -- the counts ---------------------------------------------------------------------------------------------------


def counted(world: int) -> dict[str, Any]:
    from halfstep.measure.case import build_case
    from halfstep.measure.memory.report import EstimateOptions
    from halfstep.measure.scale.report import ScaleOptions, build_scale_report

    began, cpu = time.perf_counter(), time.process_time()
    options = ScaleOptions(EstimateOptions(devices=(DEVICE,), precisions=("bf16",)), world)
    report = build_scale_report(lambda: build_case(*llama_8b(), name="llama_8b"), options)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"took": round(took, 1), "processor_seconds": round(cpu, 1), **report.as_dict()}


def lines(report: dict[str, Any]) -> list[str]:
    found = []
    for row in report["layouts"]:
        calls = ", ".join(f"{one['calls']} {one['collective']}" for one in row["collectives"])
        seconds = row["seconds"]
        found.append(
            f"{report['world']:>5}  {row['name']:<11} {format_bytes(row['peak']):>9}{' ' if row['fits'] else '!'} "
            f"{format_bytes(row['bytes_inside']):>9}  {format_bytes(row['bytes_between']):>9}  "
            f"{seconds['communication']:>6.2f}  {seconds['exposed']:>6.2f}  {calls}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, action="append", help="ranks; 8, 64, 512 and 1024 if left out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    found = collect_conditions("cpu")
    if not options.json:
        print(describe_conditions(found))
        print(f"bf16 on {DEVICE}; `!` does not fit; bytes that a rank receives a step; modeled seconds")
        print("ranks  layout           peak      inside    between  sending exposed  calls")
    reports = []
    for world in options.world or WORLDS:
        reports.append(counted(world))
        if not options.json:
            print("\n".join(lines(reports[-1])))
            took = f"{reports[-1]['took']} s, {reports[-1]['processor_seconds']} s of processors"
            print(f"       {reports[-1]['reason']} (counted in {took})", flush=True)
    command = f"python benchmarks/{Path(__file__).name} --record"
    text = json.dumps({"command": command, "conditions": found, "reports": reports}, indent=1)
    if options.json:
        print(text)
    if options.record:
        RECORD.write_text(text + "\n")


if __name__ == "__main__":
    main()
