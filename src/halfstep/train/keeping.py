"""What a run leaves in its folder: the best and the last weights, pictures, and the result."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from halfstep import world
from halfstep.draw.grid import enlarged, grid
from halfstep.draw.png import write_png
from halfstep.files import write_json, write_text
from halfstep.precision.precision import Precision
from halfstep.step.riders import Ema
from halfstep.train.data.source import Batch, Sample
from halfstep.train.journal import journal as events
from halfstep.train.journal.journal import Journal
from halfstep.train.journal.jsonl import as_line
from halfstep.train.run_folder import RESULT
from halfstep.train.task import Task
from halfstep.train.weights import finite, save_weights

BEST, LAST, LAST_AVERAGE = "best.safetensors", "last.safetensors", "last-ema.safetensors"
FACTS = "task.json"
"""What the task must know to predict without its data."""


class Keeper:
    """Writes on rank 0, and nowhere else."""

    def __init__(self, folder: Path, journal: Journal, pictures: int) -> None:
        self._folder, self._journal, self._pictures = folder, journal, pictures
        self._first = world.rank() == 0
        self._shown: Sample | None = None

    def best(self, model: nn.Module, ema: Ema | None, epoch: int, metrics: dict[str, float]) -> None:
        """The weights that were evaluated: averaged ones where there is an average."""
        with _worn(ema):
            self._save(model, BEST, "best", {"epoch": str(epoch), **{k: repr(v) for k, v in metrics.items()}})

    def last(self, model: nn.Module, ema: Ema | None) -> None:
        self._save(model, LAST, "last", {})
        if ema is not None:
            with ema.in_place():
                self._save(model, LAST_AVERAGE, "last", {})

    def _save(self, model: nn.Module, name: str, what: str, metadata: dict[str, str]) -> None:
        if not self._first:
            return
        if not finite(model):
            text = f"{name} is kept as it was: the weights now hold numbers that are not finite"
            self._journal.tell(events.NOTE, text=text, level="warning")
            return
        save_weights(model, self._folder / name, metadata)
        self._journal.tell(events.SAVED, file=name, what=what)

    def pictures(self, task: Task, model: nn.Module, val: Iterable[Batch], precision: Precision, epoch: int) -> None:
        """What the model makes of the first validation samples, one below the other, for tasks that draw."""
        if not self._first or not self._pictures:
            return
        if self._shown is None:
            self._shown = {name: tensor[: self._pictures] for name, tensor in next(iter(val)).tensors.items()}
        model.eval()
        with precision.inference(next(model.parameters()).device):
            drawn = task.pictures(model, self._shown)
        model.train()
        if drawn:
            name = f"pictures/epoch-{epoch:04d}.png"
            write_png(self._folder / name, grid([[enlarged(picture)] for picture in drawn]))
            self._journal.tell(events.SAVED, file=name, what="picture")

    def facts(self, task: Task) -> None:
        if self._first:
            write_json(self._folder / FACTS, task.facts())

    def result(self, content: dict[str, Any]) -> None:
        """The mark of a run that came to its end."""
        if self._first:
            write_text(self._folder / RESULT, as_line(content))


def _worn(ema: Ema | None) -> AbstractContextManager[None]:
    return ema.in_place() if ema is not None else nullcontext()
