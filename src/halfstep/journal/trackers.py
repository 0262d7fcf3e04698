"""Prepare the data of all trackers: scalars by name, pictures, and the attempt that they belong to."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from halfstep.files import read_json
from halfstep.journal.events import EPOCH, SAVED, SPEED, Event
from halfstep.journal.latest import LatestEvents
from halfstep.numbers import to_float

MLFLOW_FILE = "mlflow.json"
"""The file in the run's folder with the MLflow server and the id of the run, for a resume and for the user."""
LOOK, UPLOAD = "to view it:", "to upload it:"
"""The prefixes of the lines."""
WANDB, OFFLINE = "wandb", "offline-run-"
"""The folder that W&B creates in the run's folder, and the prefix of runs that wait for `wandb sync`."""


def suggest_tracker_commands(start: Event) -> list[str]:
    """Return the lines for the tracker in the recipe, if it recorded anything."""
    tracker, folder = ((start.get("recipe") or {}).get("run") or {}).get("tracker"), Path(start.get("dir", ""))
    if tracker == "tensorboard" and (folder / "tensorboard").is_dir():
        return [f"{LOOK} tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"]
    if tracker == "wandb" and _has_offline_runs(folder / WANDB):
        # With a wildcard: a resumed run has several.
        return [f"{UPLOAD} wandb sync {shlex.quote(str(folder / WANDB))}/{OFFLINE}*"]
    saved = read_json(folder / MLFLOW_FILE) if tracker == "mlflow" else None
    return [f"{LOOK} {saved['page']}"] if isinstance(saved, dict) and "page" in saved else []


def _has_offline_runs(folder: Path) -> bool:
    try:
        return any(name.startswith(OFFLINE) for name in os.listdir(folder))
    except OSError:
        return False


TRACKERS = ("none", "tensorboard", "wandb", "mlflow")
PICTURE = "picture"
"""The `kind` of a `saved` event for a picture."""


class TrackerScalars(NamedTuple):
    """Numbers by name, and the attempt that they belong to."""

    attempt: int
    values: dict[str, float]


class PictureFile(NamedTuple):
    """A PNG in the run's folder."""

    attempt: int
    file: str
    """The path below the run's folder, such as `pictures/epoch-0003.png`."""

    @property
    def name(self) -> str:
        """Return the name that all pictures of a kind share: trackers show them with a slider."""
        return self.file.rpartition("/")[0] or PICTURE


class ScalarConverter:
    """A converter from events to scalars.

    Steps are sampled at the rate of the log, since trackers are slower than steps.
    """

    def __init__(self) -> None:
        self._latest = LatestEvents()
        self._last_reported = 0

    def on_event(self, event: Event) -> TrackerScalars | None:
        """Record an event, and return its scalars or None."""
        self._latest.on_event(event)
        kind = event["event"]
        if kind == SPEED:
            values = self._step() | _collect_speed_scalars(event)
        elif kind == EPOCH:
            values = (
                self._step()
                | _prefix_scalars("train_epoch", event["train"])
                | _prefix_scalars("val", event.get("val") or {})
            )
        else:
            return None
        self._last_reported = self._latest.attempt
        return TrackerScalars(self._last_reported, values)

    def picture(self, event: Event) -> PictureFile | None:
        """Return the picture of an event that was recorded before, or None."""
        if event["event"] != SAVED or event["kind"] != PICTURE:
            return None
        return PictureFile(self._latest.attempt, str(event["file"]))

    def _step(self) -> dict[str, float]:
        step = self._latest.step
        # An epoch can end right after a line of the log: the same step must not be reported twice.
        if not step or step["attempt"] == self._last_reported:
            return {}
        chosen = {name: step.get(name) for name in ("loss", "lr", "loss_scale", "grad_norm")}
        return _prefix_scalars("train", {**chosen, "skipped": sum(self._latest.skipped.values())})


def _collect_speed_scalars(event: Event) -> dict[str, float]:
    known = {name: event.get(name) for name in ("samples_per_second", "wait_share")}
    return (
        _prefix_scalars("speed", {**known, **(event.get("memory") or {})})
        | _prefix_scalars("gpu", event.get("gpu") or {})
        | _prefix_scalars("train", event.get("train_metrics") or {})
    )


def _prefix_scalars(group: str, values: dict[str, object]) -> dict[str, float]:
    return {f"{group}/{name}": to_float(value) for name, value in values.items() if value is not None}
