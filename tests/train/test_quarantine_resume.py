"""A run that is cut, made shorter or read by workers: what it found in its data counts the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor, nn

import halfstep
from halfstep.data.dataset import Order
from halfstep.errors import WrongUse
from halfstep.journal.jsonl import read_events
from halfstep.train.run import Run
from tests.support.tiny_task import Points, Tiny

SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "data.samples": 22,
    "train.epochs": 3,
    "train.batch_size": 4,
    "train.num_workers": 0,
    "train.seed": 11,
    "checkpoint.every_steps": 1,
    "run.pictures": 1,
    "run.log_every": 2,
}
TWICE = int(Order(22, 11).numbers(0)[0])
"""A sample of the first window, which the last window of the first epoch takes again."""


class Cut(Exception):
    pass


class Drawing(Tiny):
    """Draws from Python's and NumPy's generators wherever it can."""

    calls: ClassVar[int] = 0
    cut: ClassVar[int | None] = None

    def source(self, split: Any) -> Points:
        class Shaken(Points):
            def read(self, index: int) -> dict[str, Tensor]:
                sample = super().read(index)
                return {**sample, "x": sample["x"] + random.random() * 0.1 + np.random.randn() * 0.1}

        points = super().source(split)
        points.__class__ = Shaken
        return points

    def transform(self, split: Any, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**sample, "x": sample["x"] + random.gauss(0, 0.1) + np.random.rand() * 0.1}

    def collate(self, split: Any, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(split, samples)
        return {**batch, "x": batch["x"] + random.random() * 0.1 + np.random.randn() * 0.1}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        type(self).calls += 1
        if self.calls == self.cut:
            raise Cut
        noise = random.gauss(0, 0.1) + np.random.randn() * 0.1 if model.training else 0.0
        return super().loss(model, batch, metrics) * (1 + noise)


def fit(folder: Path, task: Any = Tiny, cut: int | None = None, accept: bool = False, **settings: Any) -> Run:
    Drawing.calls, Drawing.cut = 0, cut
    changed = {**SETTINGS, "run.dir": str(folder), **{k.replace("__", "."): v for k, v in settings.items()}}
    recipe = folder.with_suffix(".yaml")
    recipe.write_text("task: tiny\n")
    return halfstep.fit(recipe, task=task, settings=changed, quiet=True, accept_recipe_change=accept)


def interrupted(folder: Path, cut: int, **settings: Any) -> None:
    with pytest.raises(Cut):
        fit(folder, Drawing, cut, **settings)


def told(folder: Path, name: str, *keys: str) -> list[list[Any]]:
    return [
        [event.get(key) for key in keys] for event in read_events(folder / "journal.jsonl") if event["event"] == name
    ]


def facts(folder: Path) -> list[Any]:
    """All that a run did, but for its times. Written out: a NaN is not equal to itself."""
    steps = told(folder, "step", "attempt", "loss", "grad_norm", "applied", "ids", "quarantined")
    return [
        repr(steps),
        repr(told(folder, "epoch", "epoch", "train", "val")),
        told(folder, "bad_sample", "index", "replacement"),
    ]


def test_a_sample_that_is_no_number_is_left_out_from_the_next_epoch_on(tmp_path: Path) -> None:
    fit(tmp_path / "run", data__nan=[TWICE])
    skipped = [step for step in told(tmp_path / "run", "step", "attempt", "quarantined", "applied") if not step[2]]
    assert skipped == [[1, [TWICE], False], [6, [TWICE], False]]
    assert {number for (number,) in told(tmp_path / "run", "bad_sample", "index")} == {TWICE}


@pytest.mark.full
def test_workers_and_a_cut_change_nothing_of_a_run_with_a_bad_sample_and_drawn_numbers(tmp_path: Path) -> None:
    settings = {"data__nan": [TWICE], "train__epochs": 2}
    fit(tmp_path / "whole", Drawing, **settings)
    whole = facts(tmp_path / "whole")
    fit(tmp_path / "workers", Drawing, train__num_workers=2, **settings)
    assert facts(tmp_path / "workers") == whole
    # Before the first epoch's repeated sample, in its evaluation, and inside the second.
    for cut, workers in ((6, 2), (6, 0), (7, 0), (11, 2)):
        folder = tmp_path / f"cut-{cut}-{workers}"
        interrupted(folder, cut, train__num_workers=workers, **settings)
        fit(folder, Drawing, train__num_workers=workers, **settings)
        assert facts(folder) == whole, f"cut at call {cut}, with {workers} workers"


def epochs(folder: Path) -> list[list[Any]]:
    return told(folder, "epoch", "epoch", "epochs", "val")


def test_a_run_made_shorter_than_it_is_ends_with_an_evaluation_and_no_further_step(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 5, train__epochs=None, train__steps=24)
    run = fit(tmp_path / "run", Drawing, accept=True, train__epochs=None, train__steps=3)
    assert (run.steps, run.reason) == (4, "finished")
    assert [(epoch, of) for epoch, of, _ in epochs(tmp_path / "run")] == [(1, 1)]
    assert run.metrics == epochs(tmp_path / "run")[-1][2]


def test_fewer_epochs_than_were_done_end_the_run_with_the_one_that_was_begun(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 12)
    run = fit(tmp_path / "run", Drawing, accept=True, train__epochs=1)
    assert run.reason == "finished"
    assert [(epoch, of) for epoch, of, _ in epochs(tmp_path / "run")] == [(1, 3), (2, 2)]


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4)])
@pytest.mark.parametrize("length", [{"train__epochs": 4}, {"train__epochs": None, "train__steps": 12}])
def test_other_batches_make_no_epoch_without_a_step(
    before: int, after: int, length: dict[str, Any], tmp_path: Path
) -> None:
    interrupted(tmp_path / "run", 10, train__batch_size=before, **length)
    run = fit(tmp_path / "run", Drawing, accept=True, train__batch_size=after, **length)
    steps = told(tmp_path / "run", "step", "epoch")
    assert run.reason == "finished"
    assert {epoch for (epoch,) in steps} == {epoch for epoch, *_ in epochs(tmp_path / "run")}
    assert run.metrics == epochs(tmp_path / "run")[-1][2], "the last epoch is evaluated"
    if "train__steps" in length:
        assert len(steps) == 12
    else:
        assert epochs(tmp_path / "run")[-1][0] <= 4


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"thing": object()}

    def set_extra_state(self, state: Any) -> None: ...


class OddTask(Drawing):
    def model(self) -> nn.Module:
        return Odd(2, 1)


@pytest.mark.wording
def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="object"):
        fit(tmp_path / "run", OddTask, checkpoint__every_steps=1000)
    assert OddTask.calls == 0
    assert not (tmp_path / "run").exists(), "the run was not begun"
