"""A whole profile: of situations whose effect no busy machine can hide, of live objects, and interrupted."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from halfstep import Counted
from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.profile import reading
from halfstep.measure.profile.examined import STAGES, ProfiledCase
from halfstep.measure.profile.facts import ProfileFacts
from halfstep.measure.profile.profile import profile
from halfstep.measure.subject import Subject
from tests.support.cases import linear, loss_fn

pytestmark = pytest.mark.usefixtures("forked_python")
HERE = "benchmarks.profile_situations"


@pytest.mark.parametrize(
    ("situation", "precision", "cause"),
    [
        ("slow_dataset", "bf16", "slow-data"),
        pytest.param("half_convolutions", "fp16", "reference-kernels", marks=pytest.mark.full),
        pytest.param("recompiling", "bf16", "recompiling", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow
def test_a_situation_is_named(situation: str, precision: str, cause: str) -> None:
    told: list[tuple[int, int]] = []
    found = profile(
        Subject(f"{HERE}:{situation}"), precision=precision, seconds=2, progress=lambda *news: told.append(news)
    )
    assert found.cause.id == cause, found.cause
    assert found.cause.command
    assert sum(found.facts.shares.values()) == pytest.approx(1.0)
    assert found.conditions["torch"] == torch.__version__
    assert told[-1] == (100, 100)
    assert not found.skipped
    assert not found.interrupted


@pytest.mark.slow
def test_switches_of_the_cases_own_code_are_seen_in_its_process_and_leave_ours_alone() -> None:
    before = torch.get_float32_matmul_precision()
    found = profile(Subject(f"{HERE}:tf32_baseline"), precision="bf16", seconds=2)
    assert torch.get_float32_matmul_precision() == before
    assert found.facts.fp32_means == "bf16"
    assert found.facts.race is not None
    assert found.facts.race.own_fp32 is not None
    assert found.facts.race.own_fp32 > 0


def test_live_objects_are_profiled_in_this_process_and_not_changed() -> None:
    model, loss, batch = linear()
    before = [p.detach().clone() for p in model.parameters()]
    found = profile(model, loss, batch, precision="bf16", seconds=1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert found.facts.asked == "bf16"
    assert found.facts.feeding is None
    assert found.facts.work is not None
    assert found.facts.work.by_format.keys() == {"bf16"}
    assert found.as_dict()["facts"]["ceiling"] >= 1.0


@pytest.mark.wording
def test_a_step_that_cannot_run_is_told_in_three_parts() -> None:
    with pytest.raises(HalfstepError, match="IndexError") as told:
        profile(Subject("tests.support.cases:broken"), precision="bf16", seconds=1)
    assert told.value.do


def nothing_opens() -> Any:
    raise OSError("the disk is gone")


def nothing_trains() -> Any:
    model, loss, batch = linear()
    return model.requires_grad_(False), loss, batch


def nothing_to_read() -> Any:
    model, loss, _ = linear()
    return model, loss, torch.utils.data.DataLoader([], batch_size=4)  # type: ignore[var-annotated,arg-type]


@pytest.mark.wording
@pytest.mark.parametrize(
    "name", ["nothing_opens", *(pytest.param(n, marks=pytest.mark.full) for n in ("nothing_trains", "nothing_to_read"))]
)
def test_what_cannot_be_opened_is_told_in_three_parts(name: str) -> None:
    with pytest.raises(WrongUse) as told:
        profile(Subject(f"tests.measure.profile.test_profile:{name}"), precision="bf16", seconds=1)
    assert told.value.allowed
    assert told.value.do


@pytest.mark.wording
def test_a_loss_that_is_not_finite_or_an_empty_batch_gives_no_verdict_on_speed() -> None:
    model, loss, (given, labels) = linear()
    found = profile(model, loss, (given * float("nan"), labels), precision="bf16", seconds=0.5)
    assert found.cause.id == "no-updates"
    assert found.cause.sentence.startswith("the loss is not finite")
    assert found.facts.race is None
    assert found.others == ()
    with pytest.raises(WrongUse, match="0 samples"):
        profile(model, loss, (given[:0], labels[:0]), precision="bf16", seconds=0.5)


def test_a_race_takes_the_pairs_that_a_claim_needs_even_where_time_is_short() -> None:
    found = profile(*linear(), precision="bf16", seconds=0.001)
    assert found.facts.race is None or found.facts.race.pairs < 60
    model, loss, batch = linear()

    def slow(model: Any, batch: Any) -> Any:
        time.sleep(0.02)
        return loss(model, batch)

    found = profile(model, slow, batch, precision="bf16", seconds=0.5)  # 75 ms for pairs, and one takes 40
    assert found.facts.race is not None
    assert found.facts.race.pairs == 6


def test_an_interrupted_race_keeps_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    model, loss, batch = linear()
    raced = ProfiledCase.race

    def interrupting(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += racing
        if calls > 60:
            raise KeyboardInterrupt
        return loss(model, batch)

    racing = 0

    def racing_now(examined: ProfiledCase, seconds: float) -> ProfileFacts:
        nonlocal racing
        racing = 1
        return raced(examined, seconds)

    monkeypatch.setitem(STAGES, "race", STAGES["race"]._replace(measure=racing_now))
    found = profile(model, interrupting, batch, precision="bf16", seconds=100)
    assert found.interrupted
    assert found.facts.race is not None
    assert found.facts.kernels is None
    assert found.skipped["kernels"] == "interrupted"
    assert "race" not in found.skipped


@pytest.mark.wording
def test_what_cannot_be_meant_is_refused() -> None:
    model, loss, batch = linear()
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(WrongUse, match="seconds"):
            profile(model, loss, batch, seconds=seconds)
    with pytest.raises(WrongUse, match="without loss_fn"):
        profile(model)
    with pytest.raises(HalfstepError, match="bf61"):
        profile(model, loss, batch, precision="bf61")


def test_a_stage_that_fails_is_skipped_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.measure.worker_process import CandidateFailed

    def fails(_examined: Any, _seconds: float) -> ProfileFacts:
        raise CandidateFailed("the disk is gone")

    monkeypatch.setitem(STAGES, "feeding", STAGES["feeding"]._replace(measure=fails))
    found = profile(*linear(), precision="bf16", seconds=0.5)
    assert found.skipped == {"feeding": "the disk is gone"}
    assert found.facts.work is not None


@pytest.mark.parametrize("stage", list(STAGES))
def test_what_was_measured_before_an_interruption_is_kept(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_examined: Any, _seconds: float) -> ProfileFacts:
        raise KeyboardInterrupt

    monkeypatch.setitem(STAGES, stage, STAGES[stage]._replace(measure=interrupt))
    found = profile(*linear(), precision="bf16", seconds=0.5)
    assert found.interrupted
    assert found.cause.command
    assert (found.facts.warming is None) == (stage == "warming")
    assert dataclasses.asdict(found.facts)["misaligned"] == ()


@pytest.mark.wording
def test_reading_can_be_looked_at_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    reading.print_read_time([f"{HERE}:slow_dataset"])
    took = float(capsys.readouterr().out.split()[0])
    assert took >= 320.0  # 16 samples of 20 ms
    with pytest.raises(WrongUse, match="one batch"):
        reading.print_read_time(["tests.support.cases:linear"])
    with pytest.raises(WrongUse, match="nothing to read"):
        reading.print_read_time([])


def test_the_own_fp32_is_run_as_the_other_arms_are() -> None:
    from halfstep.measure.case import build_case
    from halfstep.measure.profile.examined import PlainStep
    from halfstep.measure.setting import StepSetting
    from tests.support.cases import convolutions

    plain = PlainStep(build_case(*convolutions()), torch.device("cpu"), StepSetting(channels_last=True, batch=6))
    assert plain._batch[0].shape[0] == 6
    assert plain._batch[0].is_contiguous(memory_format=torch.channels_last)
    plain.step()


def test_a_loss_of_sum_and_count_has_an_fp32_of_its_own() -> None:
    from halfstep.measure.case import build_case
    from halfstep.measure.profile.examined import PlainStep
    from halfstep.measure.setting import StepSetting

    model, _, batch = linear()
    plain = PlainStep(
        build_case(model, lambda m, b: Counted(loss_fn(m, b) * 8, 8), batch), torch.device("cpu"), StepSetting()
    )
    before = [p.detach().clone() for p in plain._model.parameters()]
    plain.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, plain._model.parameters(), strict=True))
