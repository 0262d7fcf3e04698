"""Folders of runs as `halfstep train` writes them, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from halfstep.journal.events import FORMAT

RECIPE: dict[str, Any] = {
    "task": "segmentation",
    "precision": "bf16",
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"seed": 1, "batch_size": 4, "steps": 40},
    "run": {"dir": "runs/one", "log_every": 10},
}


def start(**changed: Any) -> dict[str, Any]:
    """The first event of a launch."""
    return {
        "event": "start",
        "format": FORMAT,
        "label": "one",
        "command": "halfstep train one --bf16",
        "recipe": RECIPE,
        "notes": ["a note"],
        "steps": 40,
        "epochs": 4,
        "precision": {"asked": "auto", "took": "", "chosen": "bf16", "summary": "bf16 compute", "reasons": ["fast"]},
        "device": {"name": "a processor", "place": "cpu"},
        "batch": {"per_device": 4, "devices": 1, "microbatches": 1, "total": 4},
        "steps_per_epoch": 10,
        "samples": {"train": 40, "val": 8},
        "parameters": {"total": 1000, "trainable": 1000},
        "flags": {"deterministic": "False"},
        "versions": {"halfstep": "0.1.0", "torch": "2.13.0"},
        "git": {"commit": "a" * 40, "branch": "main"},
        "metric": {"name": "iou", "higher_is_better": True},
        "findings": [],
        "host": "here",
        "job": None,
        **changed,
    }


def step(attempt: int, **changed: Any) -> dict[str, Any]:
    """An applied step; with `reason`, a skipped one."""
    figures = {"loss": 1.0 / attempt, "lr": 0.01, "loss_scale": 1.0, "grad_norm": 0.5}
    applied = "reason" not in changed
    return {
        "event": "step",
        "attempt": attempt,
        "step": attempt,
        "applied": applied,
        "reason": None,
        **figures,
        **changed,
    }


def speed(**changed: Any) -> dict[str, Any]:
    """What is measured every few steps."""
    return {
        "event": "speed",
        "samples_per_second": 100.0,
        "wait_share": 0.25,
        "memory": {"host_bytes": 2**30, "device_bytes": None, "device_peak_bytes": None},
        "gpu": None,
        "meters": {"headroom_bits": 12.5, "headroom_module": "up.0", "gradient_zero_share": 0.0},
        **changed,
    }


def epoch(number: int, iou: float, **changed: Any) -> dict[str, Any]:
    """The end of an epoch."""
    return {
        "event": "epoch",
        "epoch": number,
        "epochs": 4,
        "train": {"loss": 1.0 / number, "iou": iou / 2},
        "val": {"loss": 1.2 / number, "iou": iou},
        "best": {"metric": "iou", "value": iou, "epoch": number},
        "seconds": 3.0,
        "samples_per_second": 120.0,
        "skipped": {},
        **changed,
    }


def end(reason: str = "finished", **changed: Any) -> dict[str, Any]:
    """The last event."""
    best = {"metric": "iou", "value": 0.8, "epoch": 4}
    figures = {"metrics": {"iou": 0.75}, "best": best, "seconds": 40.0, "steps": 40, "skipped": {}}
    return {"event": "end", "reason": reason, "remedies": [], **figures, **changed}


def whole(final: float = 0.75, seed: int = 1, precision: str = "bf16", rate: float = 120.0) -> list[dict[str, Any]]:
    """All events of a finished run."""
    recipe = {**RECIPE, "precision": precision, "train": {**RECIPE["train"], "seed": seed}}
    chosen = {"asked": precision, "chosen": precision, "summary": "", "reasons": []}
    found = [start(recipe=recipe, precision=chosen)]
    found.append({"event": "precision_check", "expected": precision, "share": 1.0, "text": f"{precision}: 100.0%"})
    for number in range(1, 5):
        found += [step(10 * (number - 1) + n) for n in range(1, 11)]
        found += [speed(), epoch(number, final * number / 4, samples_per_second=rate)]
    return [*found, end(metrics={"iou": final}, best={"metric": "iou", "value": final, "epoch": 4})]


def write_run(folder: Path, events: Iterable[dict[str, Any]], **status: Any) -> Path:
    """A run's folder with these events, each a second after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    timed = [{"time": float(n), "utc": f"2026-01-01T00:00:{n % 60:02d}", **event} for n, event in enumerate(events)]
    (folder / "journal.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in timed))
    if status:
        (folder / "status.rank-00000.json").write_text(json.dumps(status))
    return folder
