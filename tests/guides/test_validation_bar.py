"""The validation bar of the U-Net guide: its numbers are validation's own, while it is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfstep
from halfstep.data.dataset import Batch
from halfstep.journal.bars import draw_bars
from halfstep.journal.events import Event, Journal
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import RunClocks
from halfstep.precision.precision import resolve_precision_name
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.tasks.segmentation import Segmentation
from halfstep.train.evaluation import SoFar, evaluate_model
from tests.journal.told import epoch, speed, start, step

CLOCKS = RunClocks(7.0, 7.0, 10.0)


def drawn(*events: Event) -> str:
    latest = LatestEvents()
    for event in events:
        latest.on_event(event)
    return "\n".join(line.plain for line in draw_bars(latest, CLOCKS, 100, "utf-8"))


def evaluating(**metrics: float) -> Event:
    return {"event": "evaluating", "time": 6.5, "epoch": 1, "done": 3, "total": 4, "metrics": metrics}


def test_the_numbers_beside_it_are_validations() -> None:
    text = drawn(start(), step(20), speed(), evaluating(loss=0.2567, iou=0.6234, dice=0.7))
    assert "[Val]" in text
    assert "val loss 0.2567 · val IoU 0.6234" in text
    assert "0.55" not in text  # the training loss
    assert "0.6543" not in text  # the training IoU


def test_the_training_numbers_come_back_with_the_next_step() -> None:
    text = drawn(start(), step(20), speed(), evaluating(loss=0.2567, iou=0.6234), epoch(), step(21, time=7.0))
    assert "val loss" not in text
    assert "IoU 0.6543" in text


def test_without_numbers_it_is_drawn_as_before() -> None:
    text = drawn(start(), step(20), speed(), evaluating())
    assert "[Val]" in text
    assert "loss 0.55" in text


def test_a_loss_that_is_not_finite_is_told() -> None:
    assert "val loss nan" in drawn(start(), step(20), evaluating(loss=float("nan"))).lower()


def test_a_run_tells_what_validation_comes_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The first batch is always told; where it is the only one, its numbers are the epoch's."""
    heard: list[Event] = []
    emit = Journal.emit

    def listen(self: Journal, event: str, **fields: Any) -> None:
        heard.append({"event": event, **fields})
        emit(self, event, **fields)

    monkeypatch.setattr(Journal, "emit", listen)
    settings = ["data.samples=10", "data.size=16", "train.batch_size=4", "model.width=4", "model.depth=2"]
    more = ["train.steps=2", "run.pictures=0", "num_workers=0", f"run.dir={tmp_path / 'run'}", "train.seed=0"]
    halfstep.fit("segmentation_tiny", settings=settings + more, quiet=True)
    told = next(event for event in heard if event["event"] == "evaluating")
    whole = next(event["val"] for event in heard if event["event"] == "epoch")
    assert told["done"] == told["total"] == 1
    assert told["metrics"] == pytest.approx(whole)


def test_reading_on_the_way_changes_nothing_and_ends_in_the_whole() -> None:
    task = Segmentation(_recipe())
    model = task.model()
    draw = torch.Generator().manual_seed(0)
    batches = [_batch(draw) for _ in range(3)]
    how: dict[str, Any] = {"precision": resolve_precision_name("fp32"), "device": torch.device("cpu")}
    readers: list[SoFar] = []
    read: list[dict[str, float]] = []
    plain = evaluate_model(task, model, batches, **how)
    found = evaluate_model(
        task, model, batches, **how, begun=readers.append, progress=lambda done, of: read.append(readers[0]())
    )  # fmt: skip
    assert found == plain == read[-1]
    assert read[0] == evaluate_model(task, model, batches[:1], **how)
    assert read[0] != plain


def _batch(draw: torch.Generator) -> Batch:
    tensors = {
        "image": torch.rand(2, 3, 16, 16, generator=draw),
        "mask": torch.randint(0, 2, (2, 16, 16), generator=draw),
        "size": torch.tensor([[16, 16], [16, 16]]),
    }
    return Batch(tensors, [0, 1], [])


def _recipe() -> Any:
    return resolve_run_recipe(
        read_recipe("segmentation_tiny"), ["model.width=4", "model.depth=2", "data.size=16"]
    ).recipe
