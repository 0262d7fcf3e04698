"""The numbers of the moment, in the words and the order that people look for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halfstep.train.journal import numbers, words
from halfstep.train.journal.journal import Event
from halfstep.train.journal.latest import Latest


def line_of(latest: Latest) -> list[words.Item]:
    """The numbers of the moment, the most important first."""
    step, speed = latest.step, latest.speed
    if not step:
        return []
    items = [words.Item(f"loss {numbers.value(step['loss'])}", not math.isfinite(numbers.real(step["loss"])))]
    items += _metric(latest)
    items.append(words.Item(f"lr {numbers.rate(step['lr'])}"))
    if step.get("loss_scale") not in (None, 1.0):
        items.append(words.Item(f"scale {numbers.scale(step['loss_scale'])}"))
    if latest.skipped:
        # A copy: the console draws this in a thread of its own, while steps go on being counted.
        items.append(words.Item(words.skips(dict(latest.skipped)), True))
    if latest.checkpoint is not None:
        items.append(words.Item(f"saved at step {numbers.count(latest.checkpoint.attempt)}"))
    return items + (_machine(speed) if speed else [])


def _metric(latest: Latest) -> list[words.Item]:
    """The metric of this epoch so far, or else of the last evaluation."""
    so_far = (latest.speed.get("train_metrics") or {}).get(latest.metric)
    last = (latest.epoch.get("val") or {}).get(latest.metric)
    if latest.metric == "loss" or (so_far is None and last is None):
        return []
    number, whose = (last, "val ") if so_far is None else (so_far, "")
    return [words.Item(f"{whose}{words.named(latest.metric)} {numbers.value(number)}")]


def _machine(speed: Event) -> list[words.Item]:
    """What the machine does: speed, waiting, memory, and the GPU where there is one."""
    wait = numbers.real(speed.get("wait_share"))
    items = [
        words.Item(f"{numbers.speed(speed['samples_per_second'])} img/s"),
        words.Item(f"wait {numbers.share(wait)}", wait > 0.2),
    ]
    memory = speed.get("memory") or {}
    if memory.get("device_bytes") is not None:
        peak = memory.get("device_peak_bytes") or memory["device_bytes"]
        items.append(words.Item(f"memory {numbers.size(memory['device_bytes'])}, peak {numbers.size(peak)}"))
    elif memory.get("host_bytes") is not None:
        items.append(words.Item(f"memory {numbers.size(memory['host_bytes'])}"))
    return items + _gpu(speed.get("gpu") or {})


def _gpu(gpu: Mapping[str, Any]) -> list[words.Item]:
    parts = []
    if gpu.get("utilisation") is not None:
        parts.append(numbers.share(gpu["utilisation"]))
    if gpu.get("power_watts") is not None:
        parts.append(f"{gpu['power_watts']:.0f} W")
    if gpu.get("temperature") is not None:
        parts.append(f"{gpu['temperature']:.0f} °C")
    return [words.Item(f"GPU {' '.join(parts)}")] if parts else []
