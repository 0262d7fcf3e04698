"""List the current numbers of a run: loss, metric, learning rate, skips, throughput, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from halfstep import numbers
from halfstep.journal import text as words
from halfstep.journal.events import Event
from halfstep.journal.latest import LatestEvents
from halfstep.metric_names import format_metric_name


class StatusItem(NamedTuple):
    """One current number, under a name by which a line that is too narrow leaves it out."""

    name: str
    text: str
    alarm: bool = False


def list_status_items(latest: LatestEvents) -> list[StatusItem]:
    """Return the current numbers, the most important first; nothing before the first step."""
    step, speed = latest.step, latest.speed
    if not step:
        return []
    items = _list_validation_items(latest) or [_build_loss_item("loss", step["loss"]), *_list_metric_items(latest)]
    items.append(StatusItem("lr", f"lr {numbers.format_learning_rate(step['lr'])}"))
    if step.get("loss_scale") not in (None, 1.0):
        items.append(StatusItem("scale", f"scale {numbers.format_loss_scale(step['loss_scale'])}"))
    if latest.skipped:
        # A copy: the console draws this in its own thread while steps continue to be counted.
        items.append(StatusItem("skips", words.describe_skips(dict(latest.skipped)), True))
    if latest.checkpoint is not None:
        items.append(StatusItem("saved", f"last saved at step {numbers.format_count(latest.checkpoint.attempt)}"))
    return items + (_list_machine_items(speed) if speed else [])


def _build_loss_item(name: str, number: Any) -> StatusItem:
    return StatusItem(
        "loss", f"{name} {numbers.format_metric_value(number)}", not math.isfinite(numbers.to_float(number))
    )


def _list_validation_items(latest: LatestEvents) -> list[StatusItem]:
    """Return the metrics of the evaluation in progress; nothing while steps are taken."""
    found = latest.evaluating.get("metrics") or {}
    if "loss" not in found:
        return []
    others = [name for name in (latest.metric,) if name != "loss" and name in found]
    told = [
        StatusItem("metric", f"val {format_metric_name(name)} {numbers.format_metric_value(found[name])}")
        for name in others
    ]
    return [_build_loss_item("val loss", found["loss"]), *told]


def _list_metric_items(latest: LatestEvents) -> list[StatusItem]:
    """Return the metric of this epoch so far, or that of the last evaluation."""
    so_far = (latest.speed.get("train_metrics") or {}).get(latest.metric)
    last = (latest.epoch.get("val") or {}).get(latest.metric)
    if latest.metric == "loss" or (so_far is None and last is None):
        return []
    number, whose = (last, "val ") if so_far is None else (so_far, "")
    return [StatusItem("metric", f"{whose}{format_metric_name(latest.metric)} {numbers.format_metric_value(number)}")]


def _list_machine_items(speed: Event) -> list[StatusItem]:
    """Return throughput, data wait, memory, and the GPU's meters if there is a GPU."""
    wait = numbers.to_float(speed.get("wait_share"))
    items = [
        StatusItem("speed", words.describe_throughput(speed)),
        StatusItem("wait", f"wait {numbers.format_percent(wait)}", wait > 0.2),
    ]
    memory = speed.get("memory") or {}
    if memory.get("device_bytes") is not None:
        peak = memory.get("device_peak_bytes") or memory["device_bytes"]
        items.append(
            StatusItem(
                "memory", f"memory {numbers.format_bytes(memory['device_bytes'])}, peak {numbers.format_bytes(peak)}"
            )
        )
    elif memory.get("host_bytes") is not None:
        items.append(StatusItem("memory", f"memory {numbers.format_bytes(memory['host_bytes'])}"))
    return items + _list_gpu_items(speed.get("gpu") or {})


def _list_gpu_items(gpu: Mapping[str, object]) -> list[StatusItem]:
    parts = []
    if gpu.get("utilisation") is not None:
        parts.append(numbers.format_percent(gpu["utilisation"]))
    if gpu.get("power_watts") is not None:
        parts.append(f"{gpu['power_watts']:.0f} W")
    if gpu.get("temperature") is not None:
        parts.append(f"{gpu['temperature']:.0f} °C")
    return [StatusItem("gpu", f"GPU {' '.join(parts)}")] if parts else []
