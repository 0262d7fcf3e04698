"""What an epoch's training metrics are: of every applied step, read without waiting for the device in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection, SumMetric

import halfstep
from halfstep.journal.jsonl import read_events
from tests.support.tiny_task import Tiny

RECIPE = """
task: tiny
precision: fp32
train: {epochs: 2, batch_size: 16, num_workers: 0, seed: 5}
run: {pictures: 0, log_every: 3}
guard: {mode: off}
"""


class Counting(Tiny):
    """Says how many samples it saw, and their mean; the second batch of an epoch spoils its step."""

    spoilt = -1

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.steps = 0
        self.seen: list[torch.Tensor] = []

    def loss(self, model: torch.nn.Module, batch: Any, metrics: Any = None) -> Any:
        first = next(iter(batch.values()))
        if metrics is not None:
            metrics["samples"].update(torch.ones(len(first)))
            metrics["mean"].update(first)
        loss = super().loss(model, batch)
        if model.training:
            self.steps += 1
            if self.steps == self.spoilt:
                return loss * float("nan")
            self.seen.append(first)
        return loss

    def metrics(self) -> MetricCollection:
        return MetricCollection({"samples": SumMetric(), "mean": MeanMetric()}, compute_groups=False)


class Spoilt(Counting):
    spoilt = 2


@pytest.mark.parametrize(("task", "samples"), [(Counting, [64.0, 64.0]), (Spoilt, [48.0, 64.0])])
def test_every_applied_step_counts_and_no_other(tmp_path: Path, task: type[Counting], samples: list[float]) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    run = halfstep.fit(recipe, task=task, settings={"run.dir": str(tmp_path / "run")}, quiet=True)
    told = read_events(run.dir / "journal.jsonl")
    epochs = [event for event in told if event["event"] == "epoch"]
    assert [epoch["train"]["samples"] for epoch in epochs] == samples
    speeds = [event for event in told if event["event"] == "speed"]
    # After the first step, as soon as the time left is known, and at the end of the epoch.
    assert [speed["train_metrics"]["samples"] for speed in (speeds[0], speeds[2])] == [16.0, samples[0]]
    assert [event["is_rough"] for event in speeds] == [True, True, True, False, False]
    assert all(event["seconds_left"] > 0 for event in speeds[:-1])
    stages = [event["text"] for event in told if event["event"] == "stage"]
    assert stages == ["reading the first 16 samples", "computing the first step in fp32, recording its operations"]
