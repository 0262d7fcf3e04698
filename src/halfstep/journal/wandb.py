"""Write the journal to Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halfstep.errors import MissingExtra
from halfstep.journal.events import START, Event
from halfstep.journal.trackers import ScalarConverter

try:
    # The names, not the module: a `wandb` folder that earlier runs left behind can be imported too, but is empty.
    from wandb import Image, Settings, init  # type: ignore[import-not-found]
except ImportError as missing:
    raise MissingExtra(
        "tracker wandb, which is not installed",
        allowed="none, and tensorboard, wandb or mlflow, if installed",
        do="pip install 'halfstep[wandb]', or run.tracker=tensorboard",
    ) from missing

OFFLINE_MODE = "offline"


class WeightsAndBiases:
    """A listener that writes a W&B run, offline by default, so that training never waits for a login or a network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scalars = ScalarConverter()
        self._run: Any = None

    def on_event(self, event: Event) -> None:
        """Start the W&B run, or log the scalars or the picture of an event."""
        scalars, picture = self._scalars.on_event(event), self._scalars.picture(event)
        if event["event"] == START:
            self._run = init(
                project="halfstep",
                name=event["label"],
                # A resumed run is another W&B run in the same group: offline runs cannot be continued.
                group=self._folder.name,
                dir=str(self._folder),
                config=event["recipe"],
                mode=choose_wandb_mode(),
                # Offline, halfstep prints how to sync; online, only W&B knows the run's address.
                settings=Settings(silent=choose_wandb_mode() == OFFLINE_MODE),
            )
        elif scalars is not None and self._run is not None:
            self._run.log(scalars.values, step=scalars.attempt)
        elif picture is not None and self._run is not None:
            self._run.log({picture.name: Image(str(self._folder / picture.file))}, step=picture.attempt)

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without logging it."""
        self._scalars.on_event(event)

    def close(self) -> None:
        """Finish the W&B run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def choose_wandb_mode() -> str:
    """Return the W&B mode: WANDB_MODE if set, else online with WANDB_API_KEY, else offline."""
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else OFFLINE_MODE)
