"""Weights & Biases, fed from the journal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halfstep.errors import MissingExtra
from halfstep.train.journal import journal
from halfstep.train.journal.journal import Event
from halfstep.train.journal.trackers import Scales

try:
    # A folder of this name, which its runs leave behind, is importable too, and has nothing in it.
    from wandb import init  # type: ignore[import-not-found]
except ImportError as missing:
    raise MissingExtra(
        "tracker wandb, which is not installed",
        allowed="none, tensorboard or wandb, where they are installed",
        do="pip install halfstep[wandb], or run.tracker=tensorboard",
    ) from missing


class WeightsAndBiases:
    """A run of W&B. Offline unless the environment says otherwise: training never waits for a login or a network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scales = Scales()
        self._run: Any = None

    def hear(self, event: Event) -> None:
        scalars = self._scales.hear(event)
        if event["event"] == journal.START:
            self._run = init(
                project="halfstep",
                name=event["label"],
                # A run that is taken up again is another one of W&B, beside the first: offline, none can be continued.
                group=self._folder.name,
                dir=str(self._folder),
                config=event["recipe"],
                mode=mode(),
            )
        elif scalars is not None and self._run is not None:
            self._run.log(scalars.values, step=scalars.attempt)

    def recall(self, event: Event) -> None:
        self._scales.hear(event)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def mode() -> str:
    """What WANDB_MODE says; else online where a key is in the environment, offline where `wandb sync` is to follow."""
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
