"""A finished run goes on beyond its end: bit by bit as if it had been so long from the beginning."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.errors import Contradiction, FolderTaken, HalfstepError, StateMismatch, Stopped, WrongUse
from halfstep.train.run import Run
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events

COSINE = {"schedule.name": "cosine", "train.ema": 0.9, "model.batchnorm": True}
PER_EPOCH = 4


class StoppingLater(Tiny):
    """Is asked to stop in the middle of the first epoch of its extension, after an evaluation that is done again."""

    batches = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.batches += 1
        if self.batches == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


def fit(folder: Path, task: Any = Tiny, *, extend: bool = False, rewarm: bool = False, **settings: Any) -> Run:
    folder.mkdir(exist_ok=True)
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE)
    changed = {"run.dir": str(folder / "run"), **{key.replace("__", "."): value for key, value in settings.items()}}
    return halfstep.fit(recipe, task=task, settings=changed, quiet=True, extend=extend, rewarm=rewarm)


def again(folder: Path, like: Path) -> Run:
    """From the first step on, by the recipe that a run has left."""
    settings = {"run.dir": str(folder / "run")}
    return halfstep.fit(like / "run" / "recipe.yaml", task=Tiny, settings=settings, quiet=True)


def steps(folder: Path) -> list[tuple[int, float, float]]:
    return [(event["attempt"], event["loss"], event["lr"]) for event in events(folder / "run", "step")]


def rates(folder: Path) -> list[float]:
    return [lr for _, _, lr in steps(folder)]


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return {key: content[key] for key in ("weights", "metrics", "best", "steps", "skipped", "reason")}


@pytest.mark.parametrize(
    ("name", "rewarm"),
    [
        *(("cosine", False), ("step", True), ("one-cycle", False)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("cosine", True), ("step", False), ("one-cycle", True))
        ),
    ],
)
def test_an_extended_run_is_the_run_that_its_recipe_now_says(tmp_path: Path, rewarm: bool, name: str) -> None:
    settings = {**COSINE, "schedule.name": name, "schedule.every_epochs": 3, "schedule.warmup_steps": 2}
    fit(tmp_path / "run", **settings)
    fit(tmp_path / "run", extend=True, rewarm=rewarm, train__epochs=7, **settings)
    again(tmp_path / "whole", tmp_path / "run")
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert [event["epoch"] for event in events(tmp_path / "run" / "run", "epoch")] == [1, 2, 3, 4, 5, 6, 7]


def test_the_learning_rate_stays_at_its_last(tmp_path: Path) -> None:
    fit(tmp_path, **COSINE)
    fit(tmp_path, extend=True, train__epochs=6, **COSINE)
    found = rates(tmp_path)
    assert len(found) == 6 * PER_EPOCH
    assert found[15:] == [found[15]] * 9
    assert 0.0 < found[15] < found[14]


def test_a_new_warm_up_and_decay_go_over_what_is_added(tmp_path: Path) -> None:
    fit(tmp_path, **COSINE)
    fit(tmp_path, extend=True, rewarm=True, train__epochs=10, **COSINE)
    found = rates(tmp_path)[16:]
    assert found[2] == max(found) == pytest.approx(0.05)  # two of 24 are its warm-up
    assert found[0] < found[1] < found[2]
    assert all(earlier > later for earlier, later in itertools.pairwise(found[2:]))
    assert 0.0 < found[-1] < 0.001


def test_an_extension_that_is_interrupted_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        fit(tmp_path / name, **COSINE)
    longer = {"train.epochs": 8, **COSINE}
    fit(tmp_path / "whole", extend=True, rewarm=True, **longer)
    with pytest.raises(Stopped):
        fit(tmp_path / "cut", StoppingLater, extend=True, rewarm=True, **longer)
    assert 16 < len(steps(tmp_path / "cut")) < 32
    fit(tmp_path / "cut", extend=True, rewarm=True, **longer)
    assert steps(tmp_path / "cut") == steps(tmp_path / "whole")
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    starts = [event["resumed"]["extended"] for event in events(tmp_path / "cut" / "run", "start")[1:]]
    assert starts[0]["to"] == 32
    assert starts[1] is None, "the second launch goes on with what the first has extended"


def test_the_journal_tells_what_was_extended_and_what_the_run_had_come_to(tmp_path: Path) -> None:
    first = fit(tmp_path, **COSINE)
    fit(tmp_path, extend=True, train__epochs=5, **COSINE)
    told = events(tmp_path / "run", "start")[-1]["resumed"]
    assert told["exact"]
    assert (told["extended"]["from"], told["extended"]["to"]) == (16, 20)
    assert told["extended"]["previous"]["metrics"] == first.metrics
    log = (tmp_path / "run" / "train.log").read_text()
    assert "extended from step 16 to step 20 (5 epochs)" in log
    assert "learning rate: stays at its last value" in log
    assert "add --rewarm" in log, "a cosine ends at next to nothing"


def test_a_run_is_extended_twice(tmp_path: Path) -> None:
    fit(tmp_path / "run", **COSINE)
    fit(tmp_path / "run", extend=True, train__epochs=6, **COSINE)
    fit(tmp_path / "run", extend=True, rewarm=True, train__epochs=9, **COSINE)
    found = rates(tmp_path / "run")
    assert found[16:24] == [found[15]] * 8
    assert max(found[24:]) == pytest.approx(0.05)
    again(tmp_path / "whole", tmp_path / "run")
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    assert result(tmp_path / "run") == result(tmp_path / "whole")


def test_a_run_that_ended_inside_an_epoch_goes_on_inside_it(tmp_path: Path) -> None:
    fit(tmp_path / "run", train__steps=6)
    best = result(tmp_path / "run")["best"]
    fit(tmp_path / "run", extend=True, train__steps=7)
    assert result(tmp_path / "run")["best"]["value"] <= best["value"]
    fit(tmp_path / "run", extend=True, train__epochs=3)
    fit(tmp_path / "whole", train__epochs=3)
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    assert result(tmp_path / "run")["weights"] == result(tmp_path / "whole")["weights"]


def test_the_best_of_an_end_inside_an_epoch_is_not_forgotten(tmp_path: Path) -> None:
    fit(tmp_path, train__steps=6)
    best = result(tmp_path)["best"]
    fit(tmp_path, extend=True, train__steps=9, evaluate__min_delta=100.0)  # nothing is ever better than that
    assert result(tmp_path)["best"] == best


def test_a_run_that_was_interrupted_can_be_made_longer_before_its_end(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        fit(tmp_path / "run", StoppingLater, **COSINE)
    fit(tmp_path / "run", extend=True, train__epochs=6, **COSINE)
    found = rates(tmp_path / "run")
    assert len(found) == 24
    assert found[15:] == [found[15]] * 9
    assert events(tmp_path / "run" / "run", "start")[-1]["resumed"]["exact"]


def test_an_extension_without_a_warm_up_gets_one_when_it_is_typed_again_with_it(tmp_path: Path) -> None:
    fit(tmp_path, **COSINE)
    with pytest.raises(Stopped):
        fit(tmp_path, StoppingLater, extend=True, train__epochs=8, **COSINE)
    at = len(steps(tmp_path))
    fit(tmp_path, extend=True, rewarm=True, train__epochs=8, **COSINE)
    assert max(rates(tmp_path)[:at][16:]) < 0.001
    assert max(rates(tmp_path)[at:]) == pytest.approx(0.05)


@pytest.mark.parametrize("lost", ["recipe.yaml", "checkpoints"])
def test_an_extension_that_was_killed_between_two_of_its_files_is_begun_again(tmp_path: Path, lost: str) -> None:
    fit(tmp_path / "run", **COSINE)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    fit(tmp_path / "whole", **COSINE)
    for name in ("run", "whole"):
        fit(tmp_path / name, extend=True, train__epochs=6, **COSINE)
    # As if nothing had been written after the end was taken away, but the recipe, or but the checkpoint.
    (tmp_path / "run" / "run" / "result.json").unlink()
    if lost == "recipe.yaml":
        shutil.copy(tmp_path / "old" / "run" / lost, tmp_path / "run" / "run" / lost)
    else:
        shutil.rmtree(tmp_path / "run" / "run" / lost)
        shutil.copytree(tmp_path / "old" / "run" / lost, tmp_path / "run" / "run" / lost)
    fit(tmp_path / "run", extend=True, train__epochs=6, **COSINE)
    assert result(tmp_path / "run") == result(tmp_path / "whole")


@pytest.mark.wording
def test_a_run_that_lost_its_patience_needs_more_of_it(tmp_path: Path) -> None:
    stale = {"evaluate.patience": 2, "evaluate.min_delta": 100.0}
    assert fit(tmp_path, **stale, **COSINE).reason == "early_stopping"
    with pytest.raises(FolderTaken, match=r"stopped early, after 2 evaluations(.|\n)*evaluate\.patience=4"):
        fit(tmp_path, extend=True, train__epochs=6, **stale, **COSINE)
    run = fit(tmp_path, extend=True, train__epochs=6, evaluate__patience=None, evaluate__min_delta=100.0, **COSINE)
    assert (run.reason, run.steps) == ("finished", 24)
    found = rates(tmp_path)
    assert found[14] > found[15] == found[-1], "the schedule goes on to the end that it was made for, and stays there"


def test_a_plateau_keeps_its_cuts_unless_it_is_warmed_up_again(tmp_path: Path) -> None:
    settings = {"schedule.name": "plateau", "schedule.patience": 0, "evaluate.min_delta": 100.0}
    fit(tmp_path, **settings)
    fit(tmp_path, extend=True, train__epochs=5, **settings)
    cut = rates(tmp_path)[16]
    assert cut < 0.05
    fit(tmp_path, extend=True, rewarm=True, train__epochs=7, **settings)
    assert rates(tmp_path)[21] == pytest.approx(0.05)


def refusal(folder: Path, **settings: Any) -> HalfstepError:
    with pytest.raises(HalfstepError) as caught:
        fit(folder, **settings)
    return caught.value


@pytest.mark.wording
def test_what_is_asked_of_a_finished_run_is_answered_with_what_to_type(tmp_path: Path) -> None:
    fit(tmp_path)
    before = (tmp_path / "run" / "result.json").read_bytes()
    longer = refusal(tmp_path, train__epochs=25)
    assert "finished after 4 epochs; 25 epochs are requested" in longer.given
    assert "fit(..., extend=True) to continue to 25 epochs, with rewarm=True" in longer.do
    shorter = refusal(tmp_path, train__epochs=2)
    assert "extend" not in shorter.do
    assert "adds 2 epochs" in refusal(tmp_path, extend=True, train__epochs=2).do
    assert 'fit(..., extend=True, settings={"train.epochs": 6})' in refusal(tmp_path, extend=True).do
    assert (
        'fit(..., extend=True, settings={"train.steps": 20}) adds one epoch'
        in refusal(tmp_path, extend=True, train__steps=9).do
    )
    other = refusal(tmp_path, extend=True, train__epochs=6, optimizer__lr=0.5)
    assert isinstance(other, StateMismatch)
    assert "optimizer.lr: 0.05 -> 0.5" in other.given
    assert "train.epochs" not in other.given
    assert (tmp_path / "run" / "result.json").read_bytes() == before
    assert len(steps(tmp_path)) == 16, "a refused extension leaves the run as it was"


def test_an_extension_that_is_asked_for_again_returns_the_run(tmp_path: Path) -> None:
    fit(tmp_path)
    longer = fit(tmp_path, extend=True, train__epochs=6)
    assert longer.steps == 24
    assert fit(tmp_path, extend=True, train__epochs=6) == longer
    assert len(steps(tmp_path)) == 24


@pytest.mark.wording
def test_flags_that_have_no_meaning_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderTaken, match="there is no run"):
        fit(tmp_path, extend=True, train__epochs=6)
    assert not (tmp_path / "run").exists()
    with pytest.raises(Contradiction, match="rewarm=True without extend=True"):
        fit(tmp_path, rewarm=True)
    with pytest.raises(Contradiction, match="new=True together"):
        halfstep.fit(tmp_path / "tiny.yaml", task=Tiny, new=True, extend=True)


def extend_on(rank: int, folder: str) -> dict[str, Any]:
    place = Path(folder) / f"own-{rank}"
    place.mkdir(exist_ok=True)
    (place / "tiny.yaml").write_text(RECIPE)
    settings = {"run.dir": f"{folder}/run", "train.batch_size": 8, **COSINE}
    halfstep.fit(place / "tiny.yaml", task=Tiny, settings=settings, quiet=True)
    longer = {**settings, "train.epochs": 6}
    try:
        halfstep.fit(place / "tiny.yaml", task=Tiny, settings=longer, quiet=True)
    except HalfstepError as error:
        refused = error.do
    halfstep.fit(place / "tiny.yaml", task=Tiny, settings=longer, quiet=True, extend=True, rewarm=True)
    fresh = {"run.dir": f"{folder}/whole/run"}
    halfstep.fit(f"{folder}/run/recipe.yaml", task=Tiny, settings=fresh, quiet=True)
    return {"refused": refused}


@pytest.mark.wording
@pytest.mark.ranks
def test_two_processes_extend_a_run_together(on_ranks: Ranks, tmp_path: Path) -> None:
    found = on_ranks(extend_on, str(tmp_path))
    assert all("extend=True" in one["refused"] for one in found)
    assert len(steps(tmp_path)) == 24
    assert steps(tmp_path) == steps(tmp_path / "whole")
    assert result(tmp_path) == result(tmp_path / "whole")


@pytest.mark.wording
def test_a_length_in_steps_that_adds_nothing_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(WrongUse, match="has taken 16 already"):
        fit(tmp_path, extend=True, train__steps=16)
    assert (tmp_path / "run" / "result.json").exists()
