"""Real data, the same seeds and budget, strict fp32 next to bf16: time per epoch, speed-up, final metric.

    python benchmarks/real_data.py [--recipes aerial_buildings cifar10] [--seeds 3] [--set train.epochs=4] [--write]

Needs `python -m benchmarks.sets aerial_buildings` and `halfstep data get cifar10` once. The two runs of a seed are the
trainer's own, with everything it does, in one process and step by step in turns, so that whatever else the machine
does falls on both. The speed-up is the median over the pairs of steps; the first step of each epoch, in which the
epoch before is evaluated, is left out. Time per epoch is the median step times the steps of an epoch. `--write` keeps
the table next to this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from halfstep.host_memory import keep_freed_memory
from halfstep.journal.events import Journal
from halfstep.journal.listeners import create_listeners
from halfstep.precision.flags import read_fp32_flags
from halfstep.precision.hardware import describe_device
from halfstep.recipe.names import parse_typed_settings as read_settings
from halfstep.recipe.resolve import resolve_recipe
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import find_task_class
from halfstep.train.loop import Loop
from halfstep.train.run import make_loop

PRECISIONS = ("fp32", "bf16")
HERE = Path(__file__).parent


def prepared(name: str, precision: str, seed: int, folder: Path, settings: list[str]) -> Loop:
    """A run that is ready for its first step."""
    own = HERE / "recipes" / f"{name}.yaml"
    found = read_recipe(str(own) if own.exists() else name)
    kind = find_task_class(found.raw["task"])
    changes = [f"precision={precision}", f"train.seed={seed}", f"run.dir={folder}", *settings]
    recipe = resolve_recipe(found.raw, kind.schema, read_settings(changes, kind.schema), found.label).recipe
    folder.mkdir()
    return make_loop(kind(recipe), recipe, folder, Journal(create_listeners(folder, tracker="none", console=None)))


def in_turns(loops: dict[str, Loop]) -> Iterator[dict[str, float]]:
    """The seconds of each step, pair by pair; which of the two goes first alternates."""
    running = {name: loop.attempts() for name, loop in loops.items()}
    turn = 0
    while True:
        seconds = {}
        for name in PRECISIONS if turn % 2 == 0 else reversed(PRECISIONS):
            began = time.perf_counter()
            if next(running[name], None) is not None:
                seconds[name] = time.perf_counter() - began
        if len(seconds) < len(PRECISIONS):
            return
        yield seconds
        turn += 1


def train_both(name: str, seed: int, root: Path, settings: list[str], progress: Progress) -> dict[str, Any]:
    loops = {p: prepared(name, p, seed, root / f"{name}-{p}-{seed}", settings) for p in PRECISIONS}
    per_epoch, planned = loops["fp32"].train.steps_per_epoch, loops["fp32"].planned
    pairs = []
    for number, seconds in enumerate(in_turns(loops)):
        if number % per_epoch:
            pairs.append(seconds)
        progress.show(f"{name} seed {seed}: step {number + 1} of {planned} twice", (number + 1) / planned)
    return {"pairs": pairs, "per_epoch": per_epoch, "runs": {p: facts(loop) for p, loop in loops.items()}}


def facts(loop: Loop) -> dict[str, Any]:
    """What a run came to."""
    loop.journal.close()
    observed = loop.stepper.observed
    return {
        "metric": loop.last_evaluation[loop.task.metric],
        "name": loop.task.metric,
        "observed": observed.share if observed else None,
        "skipped": sum(loop.stepper.counts.skipped.values()),
        "epochs": loop.progress.epoch,
        "samples": {"train": len(loop.train.samples), "val": len(loop.val.samples)},
    }


def compare(name: str, seeds: int, settings: list[str], progress: Progress) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as root:
        for seed in range(seeds):
            found.append(train_both(name, seed, Path(root), settings, progress))
            progress.done()
    pairs = [pair for one in found for pair in one["pairs"]]
    ratios = sorted(pair["fp32"] / pair["bf16"] for pair in pairs)
    tail, first = len(ratios) // 10, found[0]["runs"]["fp32"]
    return {
        "recipe": name,
        "metric": first["name"],
        "epochs": first["epochs"],
        "samples": first["samples"],
        "steps_per_epoch": found[0]["per_epoch"],
        "speedup": {"median": statistics.median(ratios), "low": ratios[tail], "high": ratios[-1 - tail]},
        "pairs": len(ratios),
        "rows": [row(p, [pair[p] for pair in pairs], [one["runs"][p] for one in found], found) for p in PRECISIONS],
    }


def row(
    precision: str, seconds: list[float], runs: list[dict[str, Any]], found: list[dict[str, Any]]
) -> dict[str, Any]:
    metrics = [run["metric"] for run in runs]
    return {
        "precision": precision,
        "seconds_per_epoch": statistics.median(seconds) * found[0]["per_epoch"],
        "metric_mean": statistics.mean(metrics),
        "metric_sd": statistics.stdev(metrics) if len(metrics) > 1 else None,
        "metrics": metrics,
        "observed": min(run["observed"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
    }


class Progress:
    """What is running, and how long the rest will take if it is like what was."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._done, self._began, self._told = jobs, 0, time.monotonic(), 0.0

    def show(self, what: str, share: float) -> None:
        now = time.monotonic()
        if now - self._told < (1 if sys.stderr.isatty() else 30):
            return
        self._told = now
        done = (self._done + share) / self._jobs
        left = (now - self._began) * (1 / done - 1) / 60
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{what}, {left:.0f} min left   ", end=end, file=sys.stderr, flush=True)

    def done(self) -> None:
        self._done += 1


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| recipe | precision | s/epoch | speed-up | metric | mean ± sd | observed |"]
    lines += ["|---|---|---:|---:|---|---:|---:|"]
    for result in results:
        for one in result["rows"]:
            gain = result["speedup"]["median"] if one["precision"] == "bf16" else 1.0
            spread = f" ± {one['metric_sd']:.4f}" if one["metric_sd"] is not None else ""
            lines.append(
                f"| {result['recipe']} | {one['precision']} | {one['seconds_per_epoch']:.1f} | {gain:.2f}x "
                f"| {result['metric']} | {one['metric_mean']:.4f}{spread} | {one['observed']:.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["aerial_buildings", "cifar10"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for every run")
    parser.add_argument("--write", action="store_true", help="keep the table as real_data.json and real_data.md")
    given = parser.parse_args()
    keep_freed_memory()
    progress = Progress(len(given.recipes) * given.seeds)
    results = [compare(recipe, given.seeds, given.set, progress) for recipe in given.recipes]
    conditions = {
        "command": " ".join(["python benchmarks/real_data.py", *sys.argv[1:]]),
        "device": describe_device().name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flags outside of steps": read_fp32_flags(),
    }
    told = ", ".join(f"{key}: {value}" for key, value in conditions.items())
    print(told)
    print(table(results))
    if given.write:
        (HERE / "real_data.json").write_text(json.dumps({**conditions, "results": results}, indent=1) + "\n")
        (HERE / "real_data.md").write_text(f"{told}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
