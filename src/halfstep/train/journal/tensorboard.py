"""TensorBoard, fed from the journal."""

from __future__ import annotations

import json
from pathlib import Path

from halfstep.errors import MissingExtra
from halfstep.train.journal import journal
from halfstep.train.journal.journal import Event
from halfstep.train.journal.latest import CHECKPOINT
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
    """Scalars and the recipe, in a folder that `tensorboard --logdir` opens.

    A run that is taken up again writes another file beside the first; what the first has of later attempts is hidden.
    """

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        # Also where nothing is to be hidden: TensorBoard takes the first mark that it sees for an ordinary beginning.
        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=(resumed_at or 0) + 1)
        self._scales = Scales()

    def recall(self, event: Event) -> None:
        self._scales.hear(event)

    def hear(self, event: Event) -> None:
        scalars = self._scales.hear(event)
        if scalars is not None:
            for name, value in scalars.values.items():
                self._writer.add_scalar(name, value, scalars.attempt)
        elif event["event"] == journal.START:
            self._add_recipe(event)
        elif event["event"] == journal.SAVED and event["what"] == CHECKPOINT:
            # What a resume from it keeps must be on disk by then.
            self._writer.flush()

    def _add_recipe(self, start: Event) -> None:
        """At the first step that it holds for, so that it is hidden with that step."""
        resumed = start.get("resumed") or {}
        if resumed.get("checkpoint") and not resumed.get("changed"):
            return
        text = json.dumps(start["recipe"], indent=2, default=str)
        at = resumed.get("attempt", 0) + 1
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in text.splitlines()), at)

    def close(self) -> None:
        self._writer.close()
