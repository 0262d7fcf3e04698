"""TensorBoard, fed from the journal."""

from __future__ import annotations

import json
from pathlib import Path

from halfstep.errors import MissingExtra
from halfstep.train.journal import journal
from halfstep.train.journal.journal import Event
from halfstep.train.journal.trackers import Scales

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as missing:
    raise MissingExtra(
        "tracker tensorboard, which is not installed",
        allowed="none, tensorboard or wandb, where they are installed",
        do="pip install halfstep[train], or run.tracker=none",
    ) from missing


class TensorBoard:
    """Scalars and the recipe, in a folder that `tensorboard --logdir` opens."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder), flush_secs=10)
        self._scales = Scales()

    def hear(self, event: Event) -> None:
        scalars = self._scales.hear(event)
        if scalars is not None:
            for name, value in scalars.values.items():
                self._writer.add_scalar(name, value, scalars.attempt)
        elif event["event"] == journal.START:
            text = json.dumps(event["recipe"], indent=2, default=str)
            self._writer.add_text("recipe", "".join(f"    {line}\n" for line in text.splitlines()))

    def close(self) -> None:
        self._writer.close()
