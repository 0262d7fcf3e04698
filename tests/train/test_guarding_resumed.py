"""A run that gave up, or was stopped in trouble, and is taken up again: what is called good is good."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from halfstep.checkpoint.paths import CHECKPOINTS, list_generations, list_set_aside
from halfstep.errors import Diverged, Stopped
from halfstep.runs.finished import open_finished
from halfstep.train.loop import Loop
from halfstep.train.resume import find_checkpoint
from tests.support.tiny_task import Tiny
from tests.support.troubled import InOneModule, before_steps, every_loop, fit, rate_times
from tests.train.test_loop import events


def stop_before(attempt: int) -> Any:
    def ask(loop: Loop) -> None:
        if loop.stepper.counts.attempted + 1 == attempt:
            os.kill(os.getpid(), signal.SIGTERM)

    return lambda loop: before_steps(loop, lambda: ask(loop))


def failing_since(attempt: int) -> Any:
    """From here on the weights are of no use, in any precision."""

    def spoil(loop: Loop) -> None:
        if loop.stepper.counts.attempted + 1 == attempt:
            for parameter in loop.model.parameters():
                parameter.data.fill_(1e30)

    return lambda loop: before_steps(loop, lambda: spoil(loop))


def attempts(folder: Path) -> list[int]:
    return [one.attempt for one in list_generations(folder / "run" / CHECKPOINTS)]


def both(*changes: Any) -> Any:
    def change(loop: Loop) -> None:
        for one in changes:
            one(loop)

    return change


# -- which checkpoint is good -----------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_checkpoint_that_was_saved_in_trouble_is_not_called_good_after_a_resume(tmp_path: Path) -> None:
    """There was none before it; so nothing goes on from it for ever, and the run begins again."""
    with every_loop(both(failing_since(3), stop_before(5))), pytest.raises(Stopped, match="saved while steps failed"):
        fit(tmp_path, precision="fp32", checkpoint__every_steps=30)
    assert "may be bad" in events(tmp_path / "run", "end")[-1]["checkpoint_note"]
    with pytest.raises(Diverged) as caught:
        fit(tmp_path, precision="fp32", checkpoint__every_steps=30, optimizer__lr=1e-3, accept=True)
    assert "the last good checkpoint" not in str(caught.value)
    assert "must start again" in str(caught.value)
    assert caught.value.do.endswith("new=True)")
    assert events(tmp_path / "run", "end")[-1]["checkpoint"] is None


@pytest.mark.wording
def test_one_that_no_step_was_applied_after_is_set_aside_where_an_older_one_is(tmp_path: Path) -> None:
    with pytest.raises(Stopped), every_loop(stop_before(7)):
        fit(tmp_path, precision="fp32")
    newest, older = attempts(tmp_path)
    assert (newest in (7, 8), older) == (True, 5)
    with every_loop(failing_since(newest + 1)), pytest.raises(Diverged, match="step-00000005") as caught:
        fit(tmp_path, precision="fp32")
    assert "accept_recipe_change=True" in caught.value.do
    assert attempts(tmp_path) == [5]
    assert len(list_set_aside(tmp_path / "run" / CHECKPOINTS)) == 1


def test_skips_under_the_old_settings_are_not_counted_under_the_new_ones(tmp_path: Path) -> None:
    with every_loop(both(failing_since(3), stop_before(5))), pytest.raises(Stopped):
        fit(tmp_path, precision="fp32", checkpoint__every_steps=30)
    found = find_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.state.guards["guardian"]["skips"]["in_a_row"] >= 2
    with pytest.raises(Diverged):
        fit(tmp_path, precision="fp32", checkpoint__every_steps=30, optimizer__lr=1e-3, accept=True)
    again = [event for event in events(tmp_path / "run", "step") if event["attempt"] > found.generation.attempt]
    assert len(again) == 5, "as many as a run may skip that begins to fail now"


@pytest.mark.wording
def test_weights_that_were_ruined_long_before_they_failed_are_no_good_checkpoint(tmp_path: Path) -> None:
    """Steps 8 to 14 are applied at a loss of thousands; a checkpoint is taken after each."""
    with (
        every_loop(both(rate_times(1e4, since=8), failing_since(15))),
        pytest.raises(Diverged, match="last good checkpoint is step-00000007") as caught,
    ):
        fit(tmp_path, precision="fp32", checkpoint__every_steps=1, checkpoint__keep=20)
    losses = {event["attempt"]: event["loss"] for event in events(tmp_path / "run", "step") if event["applied"]}
    assert max(losses) == 14, "they were applied"
    assert min(losses[attempt] for attempt in range(9, 15)) > 10 * losses[1]
    assert "use a lower learning rate" in str(caught.value)
    assert "continue from an earlier checkpoint" not in str(caught.value)
    assert attempts(tmp_path)[0] == 7
    assert len(list_set_aside(tmp_path / "run" / CHECKPOINTS)) == 2, "they are bounded"
    run = fit(tmp_path, precision="fp32", checkpoint__every_steps=1, optimizer__lr=1e-3, accept=True)
    assert run.metrics["loss"] < 1


@pytest.mark.wording
def test_where_all_are_ruined_the_run_begins_again(tmp_path: Path) -> None:
    with every_loop(both(rate_times(1e4, since=1), failing_since(9))), pytest.raises(Diverged) as caught:
        fit(tmp_path, precision="fp32", checkpoint__every_steps=1)
    assert "must start again" in str(caught.value)
    assert caught.value.do.endswith("new=True)")


@pytest.mark.wording
def test_a_run_that_is_stopped_in_trouble_says_what_was_not_saved(tmp_path: Path) -> None:
    stop = both(failing_since(7), stop_before(8))
    with every_loop(stop), pytest.raises(Stopped, match=r"[89] was not saved: steps fail.* is step-00000005"):
        fit(tmp_path, precision="fp32")
    assert "was not saved: steps fail" in (tmp_path / "run" / "train.log").read_text()


# -- remedies ---------------------------------------------------------------------------------------------------------


def test_cures_stay_in_the_result_of_a_run_that_is_finished_without_a_guard(tmp_path: Path) -> None:
    with pytest.raises(Stopped), every_loop(stop_before(17)):
        fit(tmp_path, InOneModule, guard="repair")
    fit(tmp_path, InOneModule, guard="off")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [one["target"] for one in result["remedies"]["placed"]] == ["2"]


def test_an_unfinished_run_is_opened_with_its_cures(tmp_path: Path) -> None:
    from halfstep.precision.island import find_islands

    with pytest.raises(Stopped), every_loop(stop_before(17)):
        fit(tmp_path, InOneModule, guard="repair")
    opened = open_finished(tmp_path / "run", weights="last", precision=None, own=InOneModule)
    assert list(find_islands(opened.model)) == ["2"]
    opened = open_finished(tmp_path / "run", weights="last", precision="bf16", own=InOneModule)
    assert not list(find_islands(opened.model))


# -- weights in trouble -----------------------------------------------------------------------------------------------


def test_the_best_and_the_last_weights_stay_while_steps_fail(tmp_path: Path) -> None:
    """The second epoch ends in trouble, at the twenty-fourth step."""
    more: dict[str, Any] = {"precision": "fp32", "guard__skips_in_a_row": 6}
    seen: list[bytes] = []

    def look(loop: Loop) -> None:
        if loop.stepper.counts.attempted in (12, 24):
            seen.append((tmp_path / "run" / "last.safetensors").read_bytes())

    looking = both(failing_since(21), lambda loop: before_steps(loop, lambda: look(loop)))
    with every_loop(looking), pytest.raises(Diverged):
        fit(tmp_path, **more)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    epochs = events(tmp_path / "run", "epoch")
    assert [event["is_best"] for event in epochs] == [True, False]


def test_a_verdict_about_the_data_names_the_sample_by_its_number(tmp_path: Path) -> None:
    fit(tmp_path, precision="fp32", data__nan=[38])
    said = [event["text"] for event in events(tmp_path / "run", "guard") if event["kind"] == "verdict"]
    assert said
    assert all("(in the data set: sample 38)" in text for text in said)


class FailsInTraining(Tiny):
    """From the twenty-first batch on no step is finite, and what is evaluated looks better and better."""

    batches = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        self.batches += model.training
        loss = super().loss(model, batch, metrics)
        if not model.training:
            return loss / (1 + self.batches)
        return loss * (math.inf if self.batches > 20 else 1.0)


def test_no_evaluation_in_trouble_is_the_best(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        fit(tmp_path, FailsInTraining, precision="fp32", guard__skips_in_a_row=6)
    first, second = events(tmp_path / "run", "epoch")
    assert second["val"]["loss"] < first["val"]["loss"]
    assert (first["is_best"], second["is_best"]) == (True, False)
