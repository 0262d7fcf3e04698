"""What a run leaves in its folder: the best and the last weights, pictures, and the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from halfstep import world
from halfstep.draw.grid import enlarged, grid
from halfstep.draw.png import write_png
from halfstep.errors import HalfstepError, StorageFailed
from halfstep.files import write_json, write_text
from halfstep.precision.precision import Precision
from halfstep.step.riders import Ema
from halfstep.train.checkpoints import diverged
from halfstep.train.data.source import Batch, Sample
from halfstep.train.journal import journal as events
from halfstep.train.journal.journal import Journal
from halfstep.train.journal.jsonl import as_line
from halfstep.train.run_folder import RESULT
from halfstep.train.task import Task
from halfstep.train.weights import finite, save_weights

BEST, LAST, LAST_AVERAGE = "best.safetensors", "last.safetensors", "last-ema.safetensors"
NOT_WRITTEN = (OSError, SafetensorError)
"""How a disk says that it did not take something; safetensors has a word of its own for it."""
FACTS = "task.json"
"""What the task must know to predict without its data."""


class Keeper:
    """Writes on rank 0, and nowhere else."""

    def __init__(self, folder: Path, journal: Journal, pictures: int, infinite: Collection[str] | None = None) -> None:
        """`infinite`: the buffers that held infinities when the model was built; None where that is not known."""
        self.folder, self._journal, self._pictures, self._infinite = folder, journal, pictures, infinite
        self._first = world.rank() == 0
        self._shown: Sample | None = None
        self._unwritten: dict[str, HalfstepError] = {}
        """Files that are not what they should be, and why."""

    def best(self, model: nn.Module, ema: Ema | None, epoch: int, metrics: dict[str, float]) -> None:
        """The weights that were evaluated: averaged ones where there is an average."""
        with worn(ema):
            self._save(model, BEST, "best", {"epoch": str(epoch), **{k: repr(v) for k, v in metrics.items()}})

    def last(self, model: nn.Module, ema: Ema | None) -> None:
        self._save(model, LAST, "last", {})
        if ema is not None:
            with ema.in_place():
                self._save(model, LAST_AVERAGE, "last", {})

    def _save(self, model: nn.Module, name: str, what: str, metadata: dict[str, str]) -> None:
        if not self._first:
            return
        if not finite(model, self._infinite):
            text = f"{name} is kept as it was: the weights now hold numbers that are not finite"
            if not (self.folder / name).exists():
                text = f"{name} is not written: the weights hold numbers that are not finite"
                self._unwritten[name] = diverged(text)
            self._journal.tell(events.NOTE, text=text, level="warning")
            return
        self._write(name, what, lambda path: save_weights(model, path, metadata))

    def _write(self, name: str, what: str, write: Callable[[Path], None]) -> None:
        """A disk without room is no reason to stop: the next checkpoint tells whether the run can go on."""
        try:
            write(self.folder / name)
        except NOT_WRITTEN as error:
            self._unwritten[name] = _storage_failed(name, _in_words(error))
            text = f"{name} is kept as it was: {_in_words(error)}"
            self._journal.tell(events.NOTE, text=text, level="warning")
            return
        self._unwritten.pop(name, None)
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
            image = grid([[enlarged(picture)] for picture in drawn])
            self._write(name, "picture", lambda path: write_png(path, image))

    def facts(self, task: Task) -> None:
        if self._first:
            with _or_storage_failed(FACTS):
                write_json(self.folder / FACTS, task.facts())

    def result(self, content: dict[str, Any]) -> None:
        """The mark of a run that came to its end; one whose last or best weights are not on the disk did not."""
        if not self._first:
            return
        for name in (LAST, LAST_AVERAGE, BEST):
            if name in self._unwritten:
                raise self._unwritten[name]
        self._compare_best(content.get("best") or {})
        with _or_storage_failed(RESULT):
            write_text(self.folder / RESULT, as_line(content))

    def _compare_best(self, best: dict[str, Any]) -> None:
        """An earlier launch may have had no room for the best weights, which are gone: then the file is not they."""
        epoch, kept = best.get("epoch") or 0, _epoch_of(self.folder / BEST)
        if epoch and kept != str(epoch):
            text = f"the best epoch was {epoch}, and its weights were not kept: {BEST} is of epoch {kept or '(none)'}"
            self._journal.tell(events.NOTE, text=text, level="warning")


def _epoch_of(path: Path) -> str | None:
    """Of weights that `best` wrote; None where there are none."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("epoch")
    except NOT_WRITTEN:
        return None


@contextmanager
def _or_storage_failed(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _storage_failed(name, _in_words(error)) from error


def _storage_failed(name: str, why: str) -> StorageFailed:
    return StorageFailed(
        f"{name} could not be written: {why}",
        allowed="a disk that can be written to",
        do="make room, and start the run again with the same command: it goes on from its last checkpoint",
    )


def _in_words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip().partition("\n")[0] or type(error).__name__


def worn(ema: Ema | None) -> AbstractContextManager[None]:
    """The model wears its averages inside, where there are any."""
    return ema.in_place() if ema is not None else nullcontext()
