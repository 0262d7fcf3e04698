"""What a sharded save costs each rank: memory, time, and the files that a load opens.

    python benchmarks/sharded_save.py [--params 400] [--ranks 4] [--record]

A stack of Linear layers under FSDP2 with AdamW, trained by halfstep's own loop on forked ranks. Each rank saves three
times in the background. `rise` is by how much the peak of a rank's resident memory during its first save, from the call
to the commit, is above what it was before: the kernel's own peak (VmHWM, reset through /proc/self/clear_refs), not
samples. It is compared with `shard`, the bytes that the rank writes: a copy of these is what a save in the background
needs, once. Blocked is the time from the call to its return, the later saves' median (the first one allocates), as a
share of the median step. Then as many new ranks build the same run and resume it; `opened` is how many files of tensors
they opened in all, counted where files are opened, and `needed` is how many hold chunks of theirs, from the manifest.
What is read is compared with what was saved by a digest of each rank's shards. `--record` keeps it next to this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from halfstep.checkpoint import reading, resharding
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.sealed import read_manifest
from halfstep.journal.events import Journal
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.loop import Loop
from halfstep.train.resume import find_checkpoint, resume_from
from halfstep.train.run import make_loop
from halfstep.train.state import State

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the rig of forked ranks can be imported by name

from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny

RECORD = Path(__file__).with_suffix(".json")
LONGEST, SAVES, STEPS = 1500.0, 3, 1
RECIPE = """
task: tiny
precision: fp32
optimizer: {name: adamw, lr: 0.0001}
schedule: {name: constant}
train: {steps: 1000, batch_size: 4, num_workers: 0, seed: 5, channels_last: false}
world: fsdp
checkpoint: {every_steps: 1000000, keep: 2}
data: {samples: 65536}
run: {log_every: 1000000, pictures: 0}
"""


class Stack(Tiny):
    """A stack of square Linear layers: `model.width` is their side."""

    layers: ClassVar[int] = 24

    def model(self) -> nn.Module:
        width = self.recipe.model.width
        between = [layer for _ in range(self.layers) for layer in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(nn.Linear(2, width), *between, nn.Linear(width, 1))


def built(rank: int, folder: str, width: int) -> tuple[Loop, Any]:
    recipe = Path(folder) / f"stack-{rank}.yaml"
    recipe.write_text(RECIPE)
    asked = {"model.width": width, "run.dir": f"{folder}/run"}
    made = resolve_run_recipe(read_recipe(str(recipe)), asked, schema=Stack.schema).recipe
    (Path(folder) / "run").mkdir(exist_ok=True)
    found = find_checkpoint(Path(folder) / "run")
    choices = None if found is None else found.auto_choices
    return make_loop(Stack(made), made, Path(folder) / "run", Journal(), auto_choices=choices), found


def shards(loop: Loop) -> str:
    """Return a digest of everything that this rank writes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(State.of(loop.live).snapshot(loop.progress.attempts, {}).tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def peak() -> int:
    """Return the largest resident memory of this process since the last `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def saved(rank: int, folder: str, width: int) -> dict[str, Any]:
    loop, _ = built(rank, folder, width)
    attempts, steps, saves = loop.attempts(), [], []
    next(attempts)
    for _ in range(SAVES):
        for _ in range(STEPS):
            began = time.perf_counter()
            next(attempts)
            steps.append(time.perf_counter() - began)
        forget_peak()
        before, began = peak(), time.perf_counter()
        loop.checkpoints.save()
        blocked = time.perf_counter() - began
        loop.checkpoints.finish()
        saves.append({"rise": peak() - before, "blocked": blocked, "seconds": time.perf_counter() - began})
    last = loop.checkpoints.last
    assert last is not None
    assert last.generation is not None, "a save that failed measures nothing"
    said = {"steps": steps, "saves": saves, "shard": last.bytes, "digest": shards(loop)}
    loop.checkpoints.close()
    attempts.close()  # type: ignore[attr-defined]
    return said


def loaded(rank: int, folder: str, width: int) -> dict[str, Any]:
    loop, found = built(rank, folder, width)
    opened: Counter[str] = Counter()
    for module in (reading, resharding):
        real = module.safe_open

        def counting(path: Path, framework: str, real: Any = real) -> Any:
            opened[Path(path).name] += 1
            return real(path, framework)

        module.safe_open = counting  # type: ignore[attr-defined]
    began = time.perf_counter()
    resume_from(loop, found, Path(folder) / "elsewhere", ())
    seconds = time.perf_counter() - began
    manifest = read_manifest(found.generation)
    own = {chunk.rank for one in manifest.chunks.values() for chunk in one.chunks() if chunk.rank == rank}
    # Rank 0's file has what is not cut: counters, buffers, generators.
    return {"opened": dict(opened), "needed": sorted({*own, 0}), "seconds": seconds, "digest": shards(loop)}


def measured(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    width = round((given.params * 1e6 / Stack.layers) ** 0.5 / 64) * 64
    ranks = Ranks(given.ranks, deadline=LONGEST)
    try:
        wrote = ranks(saved, folder, width)
    finally:
        ranks.stop()
    manifest = read_manifest(list_generations(Path(folder) / "run" / CHECKPOINTS)[0])
    ranks = Ranks(given.ranks, deadline=LONGEST)
    try:
        read = ranks(loaded, folder, width)
    finally:
        ranks.stop()
    assert [one["digest"] for one in read] == [one["digest"] for one in wrote], "what was read is not what was saved"
    step = statistics.median(seconds for one in wrote for seconds in one["steps"])
    blocked = statistics.median(save["blocked"] for one in wrote for save in one["saves"][1:])
    return {
        "params": Stack.layers * width * (width + 1) + 4 * width + 1,
        "ranks": given.ranks,
        "shard": [one["shard"] for one in wrote],
        "rise": [one["saves"][0]["rise"] for one in wrote],
        "rise_later": [max(save["rise"] for save in one["saves"][1:]) for one in wrote],
        "step": step,
        "blocked": blocked,
        "blocked_first": max(one["saves"][0]["blocked"] for one in wrote),
        "save": statistics.median(save["seconds"] for one in wrote for save in one["saves"][1:]),
        "load": max(one["seconds"] for one in read),
        "opened": sum(len(one["opened"]) for one in read),
        "opens": sum(sum(one["opened"].values()) for one in read),
        "needed": sum(len(one["needed"]) for one in read),
        "files": sum(one.name.endswith(".safetensors") for one in manifest.files),
        "bytes": manifest.bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params", type=float, default=400.0, help="millions")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", help="where to write; a temporary one if it is left out")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measured(given, folder)
    print(json.dumps(found), file=sys.stderr)
    if given.record:
        content = {"command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), **found}
        RECORD.write_text(json.dumps(content, indent=1) + "\n")
    worst = max(rise / shard for rise, shard in zip(found["rise"], found["shard"], strict=True))
    words = {
        "params": f"{found['params'] / 1e6:.0f}M",
        "ranks": found["ranks"],
        "rise": f"{max(found['rise']) / 1e6:.0f}MB",
        "shard": f"{max(found['shard']) / 1e6:.0f}MB",
        "rise_over_shard": f"{worst:.3f}",
        "blocked_share": f"{found['blocked'] / found['step']:.3f}",
        "opened": found["opened"],
        "needed": found["needed"],
        "files": found["files"],
    }
    print("sharded_save", *(f"{name}={word}" for name, word in words.items()))


if __name__ == "__main__":
    main()
