"""Plans of real models, small ones: in processes of their own, and in this one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.errors import WrongUse
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import Case
from halfstep.measure.local_candidate import LocalCandidate
from halfstep.measure.plan.plan import HERE, plan
from halfstep.measure.plan.probe import compare_losses, compute_fp32_noise
from halfstep.measure.plan.race import MemoryFit, find_free_memory
from halfstep.measure.plan.search import collect_case_facts
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.worker_process import CandidateFailed, CandidateProcess
from tests.support import cases

LINEAR = Subject("tests.support.cases:linear")


def test_a_person_s_own_objects_are_planned_in_this_process_and_left_as_they_were() -> None:
    model, loss_fn, batch = cases.convolutions()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told: list[tuple[int, int]] = []
    found = plan(model, loss_fn, batch, seconds=4, device="cpu", progress=lambda *seen: told.append(seen))
    assert found.conditions["arms"] == HERE
    assert found.choice.speed is not None
    assert found.choice.setting.batch == 4
    assert found.ladder[0].setting == found.baseline
    assert len(found.baseline.as_dict()) == 8
    assert told
    assert all(0 <= done <= of == 4 for done, of in told)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    measured = [cell for cell in found.ladder if cell.speed and cell.setting.microbatches == 1]
    assert all(cell.trail[0] == pytest.approx(measured[0].trail[0], rel=0.02) for cell in measured)


@pytest.mark.wording
def test_a_model_alone_is_refused() -> None:
    with pytest.raises(WrongUse, match="without loss_fn"):
        plan(nn.Linear(2, 2))


def test_the_trail_is_the_losses_of_the_updates_that_were_timed() -> None:
    case = LINEAR.open()
    arm = Candidate(case, StepSetting("bf16"))
    arm.seconds(3)
    assert arm.trail == Candidate(case, StepSetting("bf16")).losses(3)
    with CandidateProcess(LINEAR, StepSetting("bf16")) as away:
        away.open()
        away.seconds(3)
        assert away.trail(2) == arm.trail[:2]
        assert away.graphs() == 0
        away.nudge(1e-3)
        assert away.losses(1) != arm.losses(1)


def test_a_nudge_moves_every_weight_a_little_and_the_same_way_each_time() -> None:
    case = LINEAR.open()
    one, other = Candidate(case, StepSetting()), Candidate(case, StepSetting())
    one.nudge(1e-3)
    other.nudge(1e-3)
    for moved, again, before in zip(
        one.model.parameters(), other.model.parameters(), case.model.parameters(), strict=True
    ):
        assert torch.equal(moved, again)
        assert not torch.equal(moved, before)
        torch.testing.assert_close(moved, before, rtol=1e-2, atol=0.0)


def test_bf16_keeps_parity_on_a_real_model_and_a_broken_one_does_not() -> None:
    case = LINEAR.open()
    fp32, bf16 = (Candidate(case, StepSetting(name)).losses(20) for name in ("fp32", "bf16"))
    noise = compute_fp32_noise(fp32, [nudged(case, seed) for seed in (1, 2, 3, 4)], 20)
    assert compare_losses(fp32, bf16, noise, 20).verdict == "holds"
    assert compare_losses(fp32, [loss * 1.1 for loss in bf16], noise, 20).verdict == "fails"


def nudged(case: Case, seed: int) -> list[float]:
    arm = Candidate(case, StepSetting())
    arm.nudge(1e-3, seed)
    return arm.losses(20)


def test_what_compiles_nothing_is_told() -> None:
    arm = LocalCandidate(LINEAR.open(), StepSetting(), "cpu")
    arm.open()
    arm.seconds()
    assert arm.graphs() == 0
    arm.close()
    broken = LocalCandidate(Subject("tests.support.cases:broken").open(), StepSetting(), "cpu")
    broken.open()
    with pytest.raises(CandidateFailed, match="IndexError"):
        broken.seconds()


def test_facts_are_read_from_the_case() -> None:
    facts = collect_case_facts(Subject("tests.support.cases:convolutions").open())
    assert (facts.has_images, facts.has_batch_norm, facts.samples) == (True, True, 4)
    assert (facts.optimizer, facts.learning_rate) == ("AdamW", 1e-4)
    recipe = collect_case_facts(Subject("classification_tiny", ("train.batch_size=6", "train.microbatches=2")).open())
    assert (recipe.samples, recipe.now.batch, recipe.now.microbatches) == (12, 6, 2)


def test_free_memory_is_known_here_and_unknown_memory_holds_everything() -> None:
    free = find_free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**60
    assert MemoryFit(None, lambda setting: 2**60).fits(StepSetting())
    assert not MemoryFit(2**30, lambda setting: 2**30).fits(StepSetting())
    assert MemoryFit(2**30, lambda setting: 2**29).fits(StepSetting())
    assert not MemoryFit(2**30, lambda setting: 2**29).fits(StepSetting(), StepSetting("bf16"))


def frozen() -> tuple[nn.Module, object, object]:
    model, loss_fn, batch = cases.linear()
    return model.requires_grad_(False), loss_fn, batch


def raising() -> tuple[nn.Module, object, object]:
    raise KeyError("no such file")


@pytest.mark.wording
def test_a_case_that_trains_nothing_or_raises_is_refused_with_its_line() -> None:
    with pytest.raises(WrongUse, match="no trainable parameter"):
        Subject(f"{__name__}:frozen").open()
    with pytest.raises(WrongUse, match=r"raised KeyError: 'no such file' \(.*test_plan_real\.py:\d+\)") as refused:
        Subject(f"{__name__}:raising").open()
    assert refused.value.do


def test_a_plan_here_leaves_the_callers_random_numbers_alone() -> None:
    model, loss_fn, batch = cases.linear()
    model.append(nn.Dropout(0.1))
    before = torch.get_rng_state()
    plan(model, loss_fn, batch, seconds=3, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
