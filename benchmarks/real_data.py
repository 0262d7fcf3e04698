"""Real data, the same seeds and budget, strict fp32 beside bf16: time per epoch, speed-up, final metric.

    python benchmarks/real_data.py [--recipes aerial_buildings cifar10] [--seeds 3] [--set train.epochs=4] [--write]

Needs `scripts/data aerial_buildings` and `scripts/data cifar10` once. Every run is a process of its own, started as a
person would start it; fp32 and bf16 of a seed run one after the other, the first of the pair alternating. An epoch's
time is the median over all epochs but each run's first, which is observed. `--write` keeps the table beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from halfstep.precision.hardware import describe
from halfstep.train.journal.jsonl import read_events

PRECISIONS = ("fp32", "bf16")
HERE = Path(__file__).parent


def train(recipe: str, precision: str, seed: int, folder: Path, settings: list[str]) -> dict[str, Any]:
    """One run: the seconds of its epochs, and its last metric."""
    command = [sys.executable, "-m", "halfstep", "train", recipe, f"precision={precision}", f"train.seed={seed}"]
    subprocess.run([*command, f"run.dir={folder}", *settings, "--json"], check=True, stdout=subprocess.DEVNULL)
    events = read_events(folder / "journal.jsonl")
    start = next(event for event in events if event["event"] == "start")
    epochs = [event for event in events if event["event"] == "epoch"]
    observed = next(event for event in events if event["event"] == "observed")
    return {
        "seconds": [epoch["seconds"] for epoch in epochs[1:]] or [epochs[0]["seconds"]],
        "waiting": statistics.mean(e["wait_share"] for e in events if e["event"] == "speed"),
        "metric": epochs[-1]["val"][start["metric"]["name"]],
        "name": start["metric"]["name"],
        "observed": observed["share"],
        "flags": start["flags"],
        "epochs": len(epochs),
        "samples": start["samples"],
        "skipped": sum(sum(epoch["skipped"].values()) for epoch in epochs),
    }


def compare(recipe: str, seeds: int, settings: list[str], progress: Progress) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(seeds):
            for precision in PRECISIONS if seed % 2 == 0 else reversed(PRECISIONS):
                progress.show(f"{recipe} {precision} seed {seed}")
                runs[precision].append(train(recipe, precision, seed, Path(root) / f"{precision}-{seed}", settings))
                progress.done()
    seconds = {p: statistics.median(s for run in runs[p] for s in run["seconds"]) for p in PRECISIONS}
    first = runs[PRECISIONS[0]][0]
    return {
        "recipe": recipe,
        "metric": first["name"],
        "epochs": first["epochs"],
        "samples": first["samples"],
        "flags": first["flags"],
        "speedup": seconds["fp32"] / seconds["bf16"],
        "rows": [row(precision, seconds[precision], runs[precision]) for precision in PRECISIONS],
    }


def row(precision: str, seconds: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    metrics = [run["metric"] for run in runs]
    return {
        "precision": precision,
        "seconds_per_epoch": seconds,
        "metric_mean": statistics.mean(metrics),
        "metric_sd": statistics.stdev(metrics) if len(metrics) > 1 else None,
        "metrics": metrics,
        "observed": min(run["observed"] for run in runs),
        "waiting": statistics.mean(run["waiting"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
    }


class Progress:
    """Which run is running, and how long the rest will take if it is like what was."""

    def __init__(self, runs: int) -> None:
        self._runs, self._done, self._began = runs, 0, time.monotonic()

    def show(self, what: str) -> None:
        spent = time.monotonic() - self._began
        left = f", about {spent / self._done * (self._runs - self._done) / 60:.0f} min left" if self._done else ""
        print(f"{self._done + 1}/{self._runs} {what}{left}", file=sys.stderr, flush=True)

    def done(self) -> None:
        self._done += 1


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| recipe | precision | s/epoch | speed-up | metric | mean ± sd | observed | waiting for data |"]
    lines += ["|---|---|---:|---:|---|---:|---:|---:|"]
    for result in results:
        for one in result["rows"]:
            gain = result["rows"][0]["seconds_per_epoch"] / one["seconds_per_epoch"]
            spread = f" ± {one['metric_sd']:.4f}" if one["metric_sd"] is not None else ""
            lines.append(
                f"| {result['recipe']} | {one['precision']} | {one['seconds_per_epoch']:.1f} | {gain:.2f}x "
                f"| {result['metric']} | {one['metric_mean']:.4f}{spread} | {one['observed']:.1%} "
                f"| {one['waiting']:.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["aerial_buildings", "cifar10"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for every run")
    parser.add_argument("--write", action="store_true", help="keep the table as real_data.json and real_data.md")
    given = parser.parse_args()
    progress = Progress(len(given.recipes) * given.seeds * len(PRECISIONS))
    results = [compare(recipe, given.seeds, given.set, progress) for recipe in given.recipes]
    conditions = {
        "command": " ".join(["python benchmarks/real_data.py", *sys.argv[1:]]),
        "device": describe().name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{key}: {value}" for key, value in conditions.items()))
    print(table(results))
    if given.write:
        (HERE / "real_data.json").write_text(json.dumps({**conditions, "results": results}, indent=1) + "\n")
        (HERE / "real_data.md").write_text(f"`{conditions['command']}` printed:\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
