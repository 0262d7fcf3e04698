"""Write the journal to TensorBoard."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from halfstep.errors import MissingExtra
from halfstep.files import check_ownership
from halfstep.journal.events import SAVED, START, Event
from halfstep.journal.latest import CHECKPOINT
from halfstep.journal.trackers import PictureFile, ScalarConverter

try:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from torch.utils.tensorboard import SummaryWriter
except ImportError as missing:
    raise MissingExtra(
        "tracker tensorboard, which is not installed",
        allowed="none, and tensorboard, wandb or mlflow, if installed",
        do="pip install 'halfstep[train]', or run.tracker=none",
    ) from missing


class TensorBoard:
    """A listener that writes scalars, pictures and the recipe for `tensorboard --logdir`.

    A resumed run writes a second file; TensorBoard then hides the repeated steps of the first.
    """

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        # `purge_step` also for a new run: TensorBoard ignores the first such mark that it sees, and hides data only
        # from the second on.
        self._folder = folder.parent
        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=(resumed_at or 0) + 1)
        self._scalars = ScalarConverter()

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without writing it."""
        self._scalars.on_event(event)

    def on_event(self, event: Event) -> None:
        """Write the scalars, the picture or the recipe of an event."""
        check_ownership(self._folder)  # the writer opens its file by name at every write
        scalars, picture = self._scalars.on_event(event), self._scalars.picture(event)
        if picture is not None:
            self._add_picture(picture)
        elif scalars is not None:
            for name, value in scalars.values.items():
                self._writer.add_scalar(name, value, scalars.attempt)
        elif event["event"] == START:
            self._add_recipe(event)
        elif event["event"] == SAVED and event["kind"] == CHECKPOINT:
            # A resume from this checkpoint keeps everything before it, so that must be on disk by then.
            self._writer.flush()

    def _add_picture(self, picture: PictureFile) -> None:
        """Write the PNG as it is, without decoding and compressing it again."""
        png = (self._folder / picture.file).read_bytes()
        # The IHDR chunk, with width and height, comes first in every PNG.
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        summary = Summary(value=[Summary.Value(tag=picture.name, image=image)])
        self._writer._get_file_writer().add_summary(summary, picture.attempt)  # type: ignore[no-untyped-call]

    def _add_recipe(self, start: Event) -> None:
        """Write the recipe at the first step it applies to, so that it is hidden together with that step."""
        resumed = start.get("resumed") or {}
        if resumed.get("checkpoint") and not resumed.get("changed"):
            return
        text = json.dumps(start["recipe"], indent=2, default=str)
        at = resumed.get("attempt", 0) + 1
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in text.splitlines()), at)

    def close(self) -> None:
        """Flush and close the writer, unless the run's folder is no longer its own."""
        check_ownership(self._folder)
        self._writer.close()
