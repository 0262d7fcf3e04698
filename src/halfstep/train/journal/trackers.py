"""What a tracker shows, as plain data: numbers by name, and the attempt that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import unknown_name
from halfstep.train.journal import journal
from halfstep.train.journal.journal import Event, Listener
from halfstep.train.journal.latest import Latest
from halfstep.train.journal.numbers import real

TRACKERS = ("none", "tensorboard", "wandb")


class Scalars(NamedTuple):
    attempt: int
    values: dict[str, float]


class Scales:
    """Turns events into scalars. Steps are told as often as the log is written: a tracker is slower than a step."""

    def __init__(self) -> None:
        self._latest = Latest()
        self._told = 0

    def hear(self, event: Event) -> Scalars | None:
        self._latest.hear(event)
        kind = event["event"]
        if kind == journal.SPEED:
            values = self._step() | _speed(event)
        elif kind == journal.EPOCH:
            values = self._step() | _each("train_epoch", event["train"]) | _each("val", event.get("val") or {})
        else:
            return None
        self._told = self._latest.attempt
        return Scalars(self._told, values)

    def _step(self) -> dict[str, float]:
        step = self._latest.step
        if not step or step["attempt"] == self._told:
            return {}
        chosen = {name: step.get(name) for name in ("loss", "lr", "loss_scale", "grad_norm")}
        return _each("train", {**chosen, "skipped": sum(self._latest.skipped.values())})


def tracker_listeners(name: str, folder: Path, resumed_at: int | None = None) -> list[Listener]:
    """The listener of a tracker; none for `none`. A run that is taken up again goes on after `resumed_at` attempts."""
    if name not in TRACKERS:
        raise unknown_name("tracker", name, TRACKERS)
    if name == "tensorboard":
        from halfstep.train.journal.tensorboard import TensorBoard

        return [TensorBoard(folder / "tensorboard", resumed_at)]
    if name == "wandb":
        from halfstep.train.journal.wandb import WeightsAndBiases

        return [WeightsAndBiases(folder)]
    return []


def _speed(event: Event) -> dict[str, float]:
    known = {name: event.get(name) for name in ("samples_per_second", "wait_share")}
    return (
        _each("speed", {**known, **(event.get("memory") or {})})
        | _each("gpu", event.get("gpu") or {})
        | _each("train", event.get("train_metrics") or {})
    )


def _each(group: str, values: dict[str, Any]) -> dict[str, float]:
    return {f"{group}/{name}": real(value) for name, value in values.items() if value is not None}
