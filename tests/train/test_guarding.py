"""A run under its guard: trouble is named, checkpoints stay good, and a remedy survives a resume to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from faults.refit import refit
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations, list_set_aside
from halfstep.checkpoint.reading import find_newest_intact
from halfstep.errors import BadData, Diverged, StateMismatch, Stopped
from halfstep.train.loop import Loop
from halfstep.train.resume import find_checkpoint
from tests.support.combinations import one_per_value
from tests.support.digest import digest_of
from tests.support.tiny_task import Tiny
from tests.support.troubled import InOneModule, InTheLoss, before_steps, every_loop, fit, rate_times
from tests.train.test_loop import events

STOP = 17


def stop_at(attempt: int) -> Any:
    def change(loop: Loop) -> None:
        before_steps(loop, lambda: _ask(loop.stepper.counts.attempted + 1 == attempt))

    return change


def _ask(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGTERM)


def state_of(folder: Path) -> Any:
    found = find_checkpoint(folder / "run")
    assert found is not None
    return found.state


def ended(folder: Path) -> tuple[list[Any], str]:
    """Every loss, and every tensor of the last checkpoint."""
    state = state_of(folder)
    steps = [(e["attempt"], e["loss"], e["loss_scale"], e["applied"]) for e in events(folder / "run", "step")]
    return steps, digest_of(state.weights, state.optimizers, state.loss_scales, state.guards, state.rng)


# -- healthy runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_healthy_run_has_the_same_bits_with_and_without_a_guard(tmp_path: Path, precision: str) -> None:
    found = []
    for mode in ("off", "watch", "repair"):
        fit(tmp_path / mode, precision=precision, guard__mode=mode)
        state = state_of(tmp_path / mode)
        found.append(
            digest_of(state.weights, state.optimizers, state.rng, [e["loss"] for e in _steps(tmp_path / mode)])
        )
        assert sorted(state.guards) == ([] if mode == "off" else ["guardian", "spike"])
    assert len(set(found)) == 1


def _steps(folder: Path) -> list[dict[str, Any]]:
    return events(folder / "run", "step")


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_watch_names_it_and_gives_up_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(Diverged) as caught:
        fit(tmp_path, InOneModule)
    error = caught.value
    assert error.exit_code == 80
    assert "2.up" in str(error)
    assert "fp16" in str(error)
    assert "'guard': 'repair'" in error.do
    (end,) = events(tmp_path / "run", "end")
    assert end["reason"] == "gave_up"
    assert end["cause"] == "precision"
    assert end["checkpoint"] is None
    assert end["do"] == error.do
    assert len(_steps(tmp_path)) == 5 == sum(end["skipped"].values())
    (verdict,) = events(tmp_path / "run", "guard")
    assert verdict["kind"] == "verdict"
    assert verdict["facts"]["culprit"]["module"] == "2.up"
    log = (tmp_path / "run" / "train.log").read_text()
    assert "guard: precision: 2.up" in log
    assert log.rstrip().splitlines()[-1].strip() == f"do: {error.do}"
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_run_that_gave_up_goes_on_with_the_cure_and_needs_no_leave(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        fit(tmp_path, InOneModule)
    run = fit(tmp_path, InOneModule, guard="repair")
    assert run.reason == "finished"
    assert run.steps == 35
    (end,) = [event for event in events(tmp_path / "run", "end") if event["reason"] == "finished"]
    assert end["remedies"] == ["2 computes in fp32"]


def test_off_means_off(tmp_path: Path) -> None:
    run = fit(tmp_path, InOneModule, guard="off", train__steps=12, train__check=False)
    assert sum(run.skipped.values()) == 12
    assert not events(tmp_path / "run", "guard")
    assert not (tmp_path / "run" / "failed_steps").exists()


@pytest.mark.parametrize(("task", "remedy"), [(InOneModule, "island"), (InTheLoss, "precision")])
def test_a_remedy_survives_a_resume_to_the_bit(tmp_path: Path, task: type[Tiny], remedy: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(whole, task, guard="repair")
    with pytest.raises(Stopped), every_loop(stop_at(STOP)):
        fit(parts, task, guard="repair")
    saved = state_of(parts)
    assert [one["kind"] for one in saved.guards["guardian"]["remedies"]["placed"]] == [remedy]
    assert (
        saved.precision == {"name": "bf16", "islands": []}
        if remedy == "precision"
        else {"name": "fp16", "islands": ["2"]}
    )
    run = fit(parts, task, guard="repair")
    assert ended(parts) == ended(whole)
    assert run.precision == saved.precision["name"]
    start = events(parts / "run", "start")[-1]
    assert start["resumed"]["exact"]
    assert start["resumed"]["attempt"] in (STOP, STOP + 1)
    assert any("placed again by the guard" in note for note in start["notes"])
    assert start["precision"]["chosen"] == run.precision


def test_a_guard_comes_and_goes_between_launches_and_cures_stay(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(whole, InOneModule, guard="repair")
    for stop, mode in ((9, "repair"), (15, "off"), (20, "off")):
        with pytest.raises(Stopped), every_loop(stop_at(stop)):
            fit(parts, InOneModule, guard=mode)
        assert state_of(parts).precision["islands"] == ["2"]
    fit(parts, InOneModule, guard="repair")
    (losses, _), (expected, _) = ended(parts), ended(whole)
    assert losses == expected
    assert len(state_of(parts).guards["guardian"]["remedies"]["placed"]) == 1


def test_a_checkpoint_from_before_there_was_a_guard_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Stopped), every_loop(stop_at(STOP)):
        fit(tmp_path, guard="off")

    def older(plain: dict[str, Any]) -> None:
        del plain["recipe"]["guard"]
        assert plain["guards"] == {}

    refit(tmp_path / "run", older)
    recipe = tmp_path / "run" / "recipe.yaml"
    text = recipe.read_text()
    begin, end = text.index("guard:"), text.index("run:\n")
    recipe.write_text(text[:begin] + text[end:])
    run = fit(tmp_path)
    assert run.steps == 36
    assert sorted(state_of(tmp_path).guards) == ["guardian", "spike"]


@pytest.mark.wording
def test_another_precision_is_trained_without_the_cures_of_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(Stopped), every_loop(stop_at(STOP)):
        fit(tmp_path, InOneModule, guard="repair")
    with pytest.raises(StateMismatch, match="precision: fp16 -> bf16"):
        fit(tmp_path, InOneModule, guard="repair", precision="bf16")
    run = fit(tmp_path, InOneModule, guard="repair", precision="bf16", accept=True)
    assert run.precision == "bf16"
    state = state_of(tmp_path)
    assert state.precision == {"name": "bf16", "islands": []}
    assert state.guards["guardian"]["remedies"]["placed"] == []


@pytest.mark.wording
@pytest.mark.parametrize(
    "made_up",
    [
        None,
        3,
        {"placed": 1, "lifted": []},
        {"placed": [{"kind": "island"}], "lifted": []},
        {"placed": [{"kind": "island", "target": 7, "culprit": "", "step": 0}], "lifted": []},
    ],
)
def test_cures_that_no_guard_placed_are_refused(tmp_path: Path, made_up: Any) -> None:
    with pytest.raises(Stopped), every_loop(stop_at(4)):
        fit(tmp_path)
    refit(tmp_path / "run", lambda plain: plain["guards"]["guardian"].update(remedies=made_up))
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(BadData, match="guard"):
        fit(tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


# -- checkpoints in trouble -------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize(*one_per_value(onset=[24, 25, 26], mode=["watch", "repair"]))
def test_the_last_good_checkpoint_stays_the_newest(tmp_path: Path, onset: int, mode: str) -> None:
    """The rate is too high from `onset` on, and every fifth step is saved: the twenty-fifth is a bad one, or not."""
    with every_loop(rate_times(1e5, since=onset)), pytest.raises(Diverged) as caught:
        fit(tmp_path, precision="fp32", guard=mode, guard__spikes="refuse", guard__rollbacks=1)
    place = tmp_path / "run" / CHECKPOINTS
    verdict, damaged = find_newest_intact(place)
    assert verdict is not None
    assert not damaged
    # The end of an epoch, the twenty-fourth step, is saved, too.
    assert verdict.generation.attempt == {24: 20, 25: 24, 26: 25}[onset]
    state = state_of(tmp_path)
    assert all(tensor.abs().max() < 100 for tensor in state.weights["parameters"].values())
    assert verdict.generation.name in str(caught.value)
    assert "optimizer.lr" in caught.value.do
    assert "accept_recipe_change=True" in caught.value.do
    assert events(tmp_path / "run", "end")[-1]["checkpoint"] == verdict.generation.name
    run = fit(tmp_path, precision="fp32", guard=mode, optimizer__lr=0.001, accept=True)
    assert run.reason == "finished"
    assert all(one.attempt >= verdict.generation.attempt for one in list_generations(place))
    assert len(list_set_aside(place)) <= 3


def test_samples_that_are_not_finite_hold_no_checkpoint_back(tmp_path: Path) -> None:
    fit(tmp_path, precision="fp32", data__nan=[0, 1, 2], checkpoint__every_steps=1, checkpoint__keep=100)
    attempts = sorted(one.attempt for one in list_generations(tmp_path / "run" / CHECKPOINTS))
    assert attempts == list(range(1, 37))


def test_the_recipe_of_a_run_says_what_it_was_guarded_by(tmp_path: Path) -> None:
    fit(tmp_path, guard="repair", train__steps=2)
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "guard:\n  mode: repair\n" in text


@pytest.mark.wording
def test_where_the_only_checkpoint_is_spoilt_the_run_begins_again(tmp_path: Path) -> None:
    with every_loop(rate_times(1e5, since=30)), pytest.raises(Diverged) as caught:
        fit(
            tmp_path,
            precision="fp32",
            guard__spikes="refuse",
            data__samples=800,
            train__steps=90,
            checkpoint__every_steps=30,
        )
    assert [one.attempt for one in list_generations(tmp_path / "run" / CHECKPOINTS)] == [30]
    assert not list_set_aside(tmp_path / "run" / CHECKPOINTS)
    assert "must start again" in str(caught.value)
    assert caught.value.do.endswith("new=True)")


@pytest.mark.wording
def test_a_run_that_is_stopped_while_steps_fail_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    def both(loop: Loop) -> None:
        rate_times(1e5, since=27)(loop)
        stop_at(29)(loop)

    with every_loop(both), pytest.raises(Stopped, match=r"step-00000025"):
        fit(tmp_path, precision="fp32")
    assert list_generations(tmp_path / "run" / CHECKPOINTS)[0].attempt == 25
    assert fit(tmp_path, precision="fp32").reason == "finished"


@pytest.mark.parametrize("mode", ["watch", "repair"])
def test_while_losses_are_far_above_the_usual_no_checkpoint_is_written(tmp_path: Path, mode: str) -> None:
    """In the default, where the updates are applied: whether they do harm is not known yet."""

    def a_hundred_times(loop: Loop) -> None:
        def now() -> float:
            return 100.0 if loop.stepper.counts.attempted >= 26 else 1.0

        loss = loop.task.loss
        loop.task.loss = lambda *given: loss(*given) * now()  # type: ignore[method-assign]

    with every_loop(a_hundred_times):
        still = {"optimizer__lr": 1e-9, "checkpoint__every_steps": 1, "checkpoint__keep": 100}
        run = fit(tmp_path, precision="fp32", guard=mode, **still)
    assert (run.reason, run.steps, run.skipped) == ("finished", 36, {})
    (told,) = events(tmp_path / "run", "guard")
    assert told["text"].startswith("a new level: ")
    known = told["facts"]["attempt"]
    assert 30 <= known <= 33
    # The one that says what it is, and two after it: three that are usual.
    attempts = {one.attempt for one in list_generations(tmp_path / "run" / CHECKPOINTS)}
    assert attempts == set(range(1, 37)) - set(range(26, known + 2))
