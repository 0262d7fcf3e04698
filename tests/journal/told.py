"""A run that only tells: the events of a short training, for listeners to hear."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console

from halfstep.journal.console import LiveConsole
from halfstep.journal.events import FORMAT, Event, Journal
from halfstep.journal.guide import GuideScreen

EPOCHS, STEPS = 2, 20


def start(chosen: str = "bf16", **changes: Any) -> Event:
    fields: Event = {
        "event": "start",
        "time": 0.0,
        "format": FORMAT,
        "label": "segmentation_tiny",
        "dir": "runs/segmentation_tiny",
        "command": "halfstep train segmentation_tiny",
        "recipe": {"task": "segmentation", "train": {"epochs": EPOCHS}},
        "precision": {"asked": "auto", "took": "", "chosen": chosen, "summary": "the fastest", "reasons": ["measured"]},
        "device": {"name": "A machine", "place": "here"},
        "batch": {"per_device": 4, "devices": 2, "microbatches": 2, "total": 16},
        "epochs": EPOCHS,
        "steps": EPOCHS * STEPS,
        "steps_per_epoch": STEPS,
        "samples": {"train": 320, "val": 64},
        "repeated_samples": 0,
        "parameters": {"total": 7_763_041, "trainable": 7_763_041},
        "flags": {},
        "versions": {"halfstep": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "metric": {"name": "iou", "higher_is_better": True},
        "notes": ["num_workers: auto took 2"],
        "findings": [],
    }
    return {**fields, **changes}


def step(attempt: int = 1, reason: str | None = None, **changes: Any) -> Event:
    fields: Event = {
        "event": "step",
        "time": attempt * 0.3,
        "epoch": 1 + (attempt - 1) // STEPS,
        "step_in_epoch": 1 + (attempt - 1) % STEPS,
        "attempt": attempt,
        "step": attempt,
        "loss": 0.5 + 1.0 / attempt,
        "lr": 1e-3 / attempt,
        "loss_scale": 1.0,
        "grad_norm": 1.25,
        "applied": reason is None,
        "reason": reason,
    }
    skipped = {"ids": [7, 8], "quarantined": []} if reason else {}
    return {**fields, **skipped, **changes}


def speed(**changes: Any) -> Event:
    memory = {"host_bytes": 3 * 2**30, "device_bytes": None, "device_peak_bytes": None}
    fields: Event = {"event": "speed", "time": 3.0, "samples_per_second": 123.4, "wait_share": 0.03, "memory": memory}
    return {**fields, "gpu": None, "seconds_left": 95.0, "train_metrics": {"iou": 0.6543}, **changes}


def epoch(number: int = 1, **changes: Any) -> Event:
    fields: Event = {
        "event": "epoch",
        "time": 6.0 * number,
        "epoch": number,
        "epochs": EPOCHS,
        "train": {"loss": 0.2345, "iou": 0.6543},
        "val": {"loss": 0.2567, "iou": 0.6234},
        "best": {"metric": "iou", "value": 0.6234, "epoch": number},
        "is_best": True,
        "seconds": 6.0,
        "lr": 3e-4,
        "skipped": {},
        "samples_per_second": 123.0,
    }
    return {**fields, **changes}


def end(**changes: Any) -> Event:
    best = {"metric": "iou", "value": 0.6234, "epoch": 2}
    fields: Event = {"event": "end", "time": 12.0, "reason": "finished", "metrics": {}, "best": best, "seconds": 12.0}
    return {**fields, "steps": EPOCHS * STEPS, "skipped": {}, **changes}


def saved(attempt: int, nth: int = 1) -> Event:
    """A checkpoint that was written."""
    file = f"checkpoints/step-{attempt:08d}.{nth:04x}"
    fields: Event = {"event": "saved", "time": attempt * 0.3, "kind": "checkpoint", "file": file, "attempt": attempt}
    return {**fields, "seconds": 0.4, "blocked": 0.02, "bytes": 3 * 2**20}


def resumed(attempt: int = 15, nth: int = 7, **changes: Any) -> dict[str, Any]:
    """The field of a second start."""
    fields = {"attempt": attempt, "epoch": 1, "checkpoint": f"step-{attempt:08d}.{nth:04x}", "repeated_steps": 3}
    return {
        **fields,
        "exact": True,
        "reasons": [],
        "changed": [],
        "accepted": [],
        "rejected_checkpoints": [],
        **changes,
    }


def note(text: str, level: str = "info") -> Event:
    return {"event": "note", "time": 1.0, "text": text, "level": level}


def whole_run(kind: str = "bf16") -> list[Event]:
    """A run of 40 attempts: `bf16`, `fp16` with overflows, `nan` with bad losses, or `no_val`."""
    events = [start("fp16" if kind == "fp16" else "bf16", samples={"train": 320, "val": 0 if kind == "no_val" else 64})]
    events.append(
        {"event": "precision_check", "time": 0.1, "expected": "bf16", "share": 0.974, "text": "97 % ran in bf16"}
    )
    skipped: dict[str, int] = {}
    for attempt in range(1, EPOCHS * STEPS + 1):
        event = _attempt(kind, attempt)
        if event["reason"]:
            skipped[event["reason"]] = skipped.get(event["reason"], 0) + 1
        events.append(event)
        if attempt % 10 == 0:
            events.append(speed(time=attempt * 0.3))
        if attempt % STEPS == 0:
            val = {} if kind == "no_val" else {"loss": 0.2567, "iou": 0.6234}
            events.append(epoch(attempt // STEPS, val=val or None, skipped=dict(skipped)))
            events.append({"event": "saved", "time": 6.0, "file": "best.safetensors", "kind": "best"})
    return [*events, end(skipped=skipped)]


def until(events: list[Event], attempt: int) -> int:
    """How many events there are up to an attempt."""
    return next(n for n, event in enumerate(events) if event.get("attempt") == attempt) + 1


def _attempt(kind: str, attempt: int) -> Event:
    if kind == "fp16":
        reason = "gradient_overflow" if attempt in (1, 2, 30) else None
        return step(attempt, reason, loss_scale=65536.0 / 2 ** min(attempt, 3), grad_norm=float("inf"))
    if kind == "nan" and attempt % 2:
        return step(attempt, "loss_not_finite", loss=float("nan"), grad_norm=float("nan"))
    return step(attempt)


def main() -> None:
    """Tell a run to a terminal for ever, for a test that interrupts it."""
    told = Journal([LiveConsole(Console(), GuideScreen())])
    try:
        for event in whole_run(json.loads(sys.argv[1])["kind"])[:15]:
            told.emit(**{k: v for k, v in event.items() if k != "time"})
        time.sleep(60)
    finally:
        told.close()


if __name__ == "__main__":
    main()
