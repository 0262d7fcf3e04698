"""Write the files of a run: the best and last weights, pictures, and the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from halfstep import distributed
from halfstep.data.dataset import Sample
from halfstep.data.loader import ValLoader
from halfstep.draw.images import write_png
from halfstep.draw.sheet import PicturedSample, draw_sample_sheet
from halfstep.errors import HalfstepError, StorageFailed
from halfstep.files import check_ownership, write_json, write_text
from halfstep.journal import events
from halfstep.journal.events import Journal
from halfstep.journal.jsonl import format_event_line
from halfstep.precision.precision import Precision
from halfstep.step.ema import Ema
from halfstep.step.synchronizers import reshard_gathered_parameters
from halfstep.train.checkpointing import build_nonfinite_weights_error
from halfstep.train.evaluation import (
    ChosenSample,
    SampleChooser,
    describe_chosen_samples,
    format_caption,
    format_caption_start,
)
from halfstep.train.run_folder import RESULT
from halfstep.train.task import Task
from halfstep.train.weights import gather_weights, has_finite_weights, save_weights

if TYPE_CHECKING:
    from halfstep.step.storage.weight_format import NarrowWeights

BEST, LAST, LAST_AVERAGE = "best.safetensors", "last.safetensors", "last-ema.safetensors"
NOT_WRITTEN = (OSError, SafetensorError)
"""Errors of a failed write; safetensors raises its own."""
PICTURES = "pictures"
_PICTURE = re.compile(r"epoch-([0-9]{4,})\.png").fullmatch
FACTS = "task.json"
"""The file with what a task needs to predict without its data."""


class RunOutputs:
    """The writer of a run's files; only rank 0 writes."""

    def __init__(
        self, folder: Path, journal: Journal, pictures: int, infinite: Collection[str] | None = None, kept: int = 100
    ) -> None:
        """Take how many samples a picture has, and how many pictures are `kept`.

        `infinite` are the buffers that held infinities when the model was built; None if that is not known.
        """
        self.folder, self._journal, self._pictures, self._infinite = folder, journal, pictures, infinite
        self._kept = kept
        self._first = distributed.rank() == 0
        self._unwritten: dict[str, HalfstepError] = {}
        """Files that are missing or outdated, and why."""

    @property
    def draws(self) -> bool:
        """Return whether this rank draws pictures."""
        return self._first and self._pictures > 0

    def best(
        self,
        model: nn.Module,
        ema: Ema | None,
        epoch: int,
        metrics: dict[str, float],
        narrow: NarrowWeights | None = None,
    ) -> None:
        """Save the weights that were evaluated: the averaged ones where there are any. `narrow`: those in bf16."""
        metadata = {"epoch": str(epoch), **{k: repr(v) for k, v in metrics.items()}}
        with use_ema_weights(ema):
            self._save(model, BEST, "best", metadata, lambda: widen_weights(model, narrow, ema))

    def last(self, model: nn.Module, ema: Ema | None, narrow: NarrowWeights | None = None) -> None:
        """Save the present weights, and their average where there is one."""
        self._save(model, LAST, "last", {}, lambda: widen_weights(model, narrow))
        if ema is not None:
            with ema.in_place():
                self._save(model, LAST_AVERAGE, "last", {}, lambda: widen_weights(model, narrow, ema))

    def _save(
        self,
        model: nn.Module,
        name: str,
        what: str,
        metadata: dict[str, str],
        written: Callable[[], nn.Module | Mapping[str, Tensor]],
    ) -> None:
        sharded = distributed.is_sharded(model.parameters())
        if not self._first and not sharded:
            return
        # An older file with finite weights is worth more than a new one without.
        is_finite = has_finite_weights(model, self._infinite)
        if not self._first:
            if is_finite:
                gather_weights(model)
            return
        if not is_finite:
            text = f"{name} is unchanged: the current weights are not finite"
            if not (self.folder / name).exists():
                text = f"{name} is not written: the weights are not finite"
                self._unwritten[name] = build_nonfinite_weights_error(text)
            self._journal.emit(events.NOTE, text=text, level="warning")
            return
        self._write(name, what, lambda path: save_weights(written(), path, metadata))

    def _write(self, name: str, what: str, write: Callable[[Path], None]) -> None:
        """Write a file, or record the failure: the next checkpoint decides whether the run can continue."""
        try:
            write(self.folder / name)
        except NOT_WRITTEN as error:
            self._unwritten[name] = _build_storage_error(name, _describe_error(error))
            text = f"{name} is unchanged: {_describe_error(error)}"
            self._journal.emit(events.NOTE, text=text, level="warning")
            return
        self._unwritten.pop(name, None)
        self._journal.emit(events.SAVED, file=name, kind=what)

    def pictures(
        self,
        task: Task,
        model: nn.Module,
        val: ValLoader,
        precision: Precision,
        epoch: int,
        choosing: SampleChooser | None = None,
        heading: str = "",
    ) -> None:
        """Draw outputs for validation samples: the worst and typical ones, or the first where none is judged.

        A sharded model computes them on every rank, and rank 0 draws.
        """
        if not self.draws and not distributed.is_sharded(model.parameters()):
            return
        chosen = choosing.chosen(self._pictures) if choosing is not None else []
        batch, captions, note = self._looked_at(model, val, chosen, choosing)
        if not batch:  # the samples became unreadable since the evaluation
            return
        model.eval()
        with precision.inference(next(model.parameters()).device):
            drawn = task.shown(model, batch)
        reshard_gathered_parameters(model)
        model.train()
        if drawn and self._first:
            name = f"{PICTURES}/epoch-{epoch:04d}.png"
            entries = [
                PicturedSample(one.panels, format_caption(words, one), one.frame)
                for one, words in zip(drawn, captions, strict=False)
            ]
            image = draw_sample_sheet(entries, f"epoch {epoch}{heading}", note, task.legend())
            self._write(name, "picture", lambda path: write_png(path, image))
            self._remove_old_pictures()

    def _remove_old_pictures(self) -> None:
        # By number, not by name: an epoch may have five digits.
        found = [(int(match[1]), path) for path in (self.folder / PICTURES).iterdir() if (match := _PICTURE(path.name))]
        for _, path in sorted(found)[: -self._kept]:
            # One that cannot be removed is no reason to end a training.
            with suppress(OSError):
                check_ownership(path)
                path.unlink()

    def _looked_at(
        self, model: nn.Module, val: ValLoader, chosen: list[ChosenSample], choosing: SampleChooser | None
    ) -> tuple[Sample, list[str], str]:
        """Return the batch, the start of each caption, and a note on all of them."""
        # Without a choice the same samples after every epoch, so that pictures can be compared.
        numbers = [one.number for one in chosen] or next(val.share.once(len(val.samples)), [])[: self._pictures]
        if distributed.is_sharded(model.parameters()):
            # The same samples on every rank: a task may call the model once for each, and all ranks gather in a call.
            numbers = json.loads(distributed.broadcast_text(json.dumps(numbers)))
        batch = val.read(numbers)
        if not chosen or choosing is None:
            return batch.tensors, [""] * len(numbers), ""
        why = {one.number: one.why for one in chosen}
        source = val.samples.source
        captions = [format_caption_start(why[number], source.name(number)) for number in batch.ids]
        return batch.tensors, captions, describe_chosen_samples(chosen, choosing.total)

    def facts(self, task: Task) -> None:
        """Write what the task needs to predict without its data; raise StorageFailed if that fails."""
        if self._first:
            with _replace_output_errors(FACTS):
                write_json(self.folder / FACTS, task.facts())

    def result(self, content: Mapping[str, object], best_epoch: int = 0) -> None:
        """Write the result, which marks a finished run.

        Raises the earlier error where the last or best weights are not on disk, and StorageFailed where writing fails.
        """
        if not self._first:
            return
        # The result marks the run as finished: missing weights would not be written later.
        for name in (LAST, LAST_AVERAGE, BEST):
            if name in self._unwritten:
                raise self._unwritten[name]
        self._compare_best(best_epoch)
        with _replace_output_errors(RESULT):
            write_text(self.folder / RESULT, format_event_line(content))

    def _compare_best(self, epoch: int) -> None:
        """Note where the file does not hold the best weights: an earlier launch may have had no space for them."""
        kept = _read_weights_epoch(self.folder / BEST)
        if epoch and kept != str(epoch):
            text = f"the best epoch was {epoch}, and its weights were not kept: {BEST} is of epoch {kept or '(none)'}"
            self._journal.emit(events.NOTE, text=text, level="warning")


def _read_weights_epoch(path: Path) -> str | None:
    """Return the epoch in the metadata of weights that `best` wrote; None if there are none."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("epoch")
    except NOT_WRITTEN:
        return None


@contextmanager
def _replace_output_errors(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _build_storage_error(name, _describe_error(error)) from error


def _build_storage_error(name: str, why: str) -> StorageFailed:
    return StorageFailed(
        f"{name} could not be written: {why}",
        allowed="a writable disk",
        do="make room, and start the run again with the same command: it continues from its last checkpoint",
    )


def _describe_error(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip().partition("\n")[0] or type(error).__name__


def widen_weights(
    model: nn.Module, narrow: NarrowWeights | None, ema: Ema | None = None
) -> nn.Module | Mapping[str, Tensor]:
    """Return the model; where its weights are stored in bf16, their values, or averages, in fp32."""
    if narrow is None:
        return model
    return narrow.wide_state(None if ema is None else ema.average_of)


def use_ema_weights(ema: Ema | None) -> AbstractContextManager[None]:
    """Return a context in which the model has its averaged weights, where there are any."""
    return ema.in_place() if ema is not None else nullcontext()
