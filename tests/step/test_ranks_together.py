"""Ranks that take part without a batch, in groups of their own, with guards of their own, and those that are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import Stepper, Window
from halfstep.errors import HalfstepError, RankFailed, WrongUse
from halfstep.step.agreement import RankVotes
from tests.support.combinations import pairwise
from tests.support.digest import digest_of
from tests.support.failing import Unreadable, batches, local_digest, loss, stepper_for
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.stop()


# -- ranks without a batch -----------------------------------------------------------------------------------------


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def counted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return halfstep.Counted(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


LOSSES = {"mean": mean_loss, "counted": counted_loss}


def examples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)


def share(step: int, place: int, of: int, microbatches: int) -> Window:
    x, y = (part.chunk(of)[place] for part in examples(step))
    return Window(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))


def uneven(rank: int, kind: str, name: str, microbatches: int) -> tuple[list[list[float]], str]:
    """All ranks have a batch at first, then ranks 1 and 3 have none, then rank 0 alone has one, then nobody."""
    stepper = stepper_for(kind, buffers=False)
    seen = []
    for step, those in enumerate([[0, 1, 2, 3], [0, 2], [0]]):
        if rank in those:
            report = stepper.step(LOSSES[name], share(step, those.index(rank), len(those), microbatches))
        else:
            report = stepper.step(None)
        assert report is not None
        seen.append([report.loss, report.grad_norm, float(report.applied)])
    assert stepper.step(None) is None
    assert stepper.counts.attempted == 3
    return seen, digest_of({n: p.full_tensor() if kind == "FSDP2" else p for n, p in stepper.model.named_parameters()})


@pytest.mark.parametrize(*pairwise(kind=["DDP", "FSDP2"], name=LOSSES, microbatches=[1, 2]))
def test_ranks_without_a_batch_add_nothing(four: Ranks, kind: str, name: str, microbatches: int) -> None:
    whole = stepper_for("alone", buffers=False)
    expected = [whole.step(LOSSES[name], examples(step)) for step in range(3)]
    found = four(uneven, kind, name, microbatches)
    assert len({digest for _, digest in found}) == 1
    for seen, _ in found:
        assert [loss for loss, _, _ in seen] == pytest.approx([r.loss for r in expected], rel=1e-5)
        assert [norm for _, norm, _ in seen] == pytest.approx([r.grad_norm for r in expected], rel=1e-4)


def first_count_is_missing(rank: int) -> tuple[float, float | None]:
    stepper = stepper_for("DDP", buffers=True)
    report = stepper.step(None) if rank == 0 else stepper.step(counted_loss, share(0, rank - 1, 3, 1))
    assert report is not None
    return report.loss, stepper.state_dict()["losses"]["loss"]["base_count"]


def test_rank_zero_has_no_batch_in_the_first_counted_window(four: Ranks) -> None:
    found = four(first_count_is_missing)
    assert len(set(found)) == 1
    assert found[0][1] == 32.0  # rank 1's eight, times four ranks


def no_batch_at_first(rank: int) -> tuple[str, str, float]:
    stepper, since = stepper_for("FSDP2", buffers=True), time.monotonic()
    before = local_digest(stepper)
    try:
        stepper.step(loss, (batches(rank, 0)[0], "")) if rank else stepper.step(None)
    except HalfstepError as error:
        assert local_digest(stepper) == before
        return type(error).__name__, str(error), time.monotonic() - since
    return "", "", 0.0


@pytest.mark.wording
def test_no_batch_in_the_first_window_of_fsdp2_is_told_to_all(four: Ranks) -> None:
    zero, *others = four(no_batch_at_first)
    four.stop()
    assert zero[0] == "WrongUse"
    assert all(kind == "RankFailed" and "rank 0 failed" in words for kind, words, _ in others)
    assert all("step(None) in the first window" in words for _, words, _ in others)
    assert max(seconds for _, _, seconds in [zero, *others]) < 5


@pytest.mark.wording
def test_one_process_has_nobody_to_take_part_with() -> None:
    with pytest.raises(WrongUse, match=r"step\(None\)"):
        stepper_for("alone", buffers=True).step(None)


# -- groups of their own -------------------------------------------------------------------------------------------


def two_jobs(rank: int) -> tuple[str, list[bool], float]:
    """Ranks 0 and 1 train one model, 2 and 3 another, with other numbers of steps; one rank of the first job fails."""
    jobs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    options = {"precision": "fp32", "process_group": jobs[rank // 2]}
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), **options)
    torch.manual_seed(rank)
    applied = []
    for step in range(3 if rank < 2 else 6):
        try:
            applied.append(
                stepper.step(fails_at_two if rank == 1 and step == 2 else squares, torch.randn(4, 8)).applied
            )
        except (RankFailed, Unreadable):
            applied.append(False)
    return digest_of(dict(model.named_parameters())), applied, float(stepper.ranks.size)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def fails_at_two(model: nn.Module, x: Tensor) -> Tensor:
    raise Unreadable("sample 7")


def test_jobs_in_groups_of_their_own(four: Ranks) -> None:
    a, b, c, d = four(two_jobs)
    assert a[0] == b[0] != c[0] == d[0]
    assert a[1] == b[1] == [True, True, False]
    assert c[1] == d[1] == [True] * 6
    assert {one[2] for one in (a, b, c, d)} == {2.0}


# -- guards --------------------------------------------------------------------------------------------------------


class OnRankTwo:
    name = "own"

    def __init__(self, does: str) -> None:
        self.does = does

    def passes(self, report: Any) -> bool:
        if dist.get_rank() == 2 and report.step == 2:
            if self.does == "raises":
                raise Unreadable("a guard's file")
            return False
        return True


def guarded(rank: int, does: str) -> tuple[list[str], bool]:
    stepper = stepper_for("DDP", buffers=True, guards=[OnRankTwo(does)])
    said, unchanged = [], True
    for step in range(3):
        before = local_digest(stepper)
        try:
            said.append(str(stepper.step(loss, (batches(rank, step)[0], "")).reason))
        except (Unreadable, RankFailed) as error:
            said.append(f"{type(error).__name__} {error}".splitlines()[0])
            unchanged = local_digest(stepper) == before
    return said, unchanged


def test_a_guard_that_refuses_on_one_rank_refuses_on_all(four: Ranks) -> None:
    assert four(guarded, "refuses") == [(["None", "guard:own", "guard:own"], True)] * 4


@pytest.mark.wording
def test_a_guard_that_raises_on_one_rank_ends_the_window_on_all(four: Ranks) -> None:
    found = four(guarded, "raises")
    assert found[2][0][1] == "Unreadable a guard's file"
    for rank in (0, 1, 3):
        assert found[rank][0][1] == "RankFailed rank 2 failed in this window: Unreadable: a guard's file"
    assert all(unchanged for _, unchanged in found)


# -- the caller's own forward pass ---------------------------------------------------------------------------------


def own_forward(rank: int, place: str) -> tuple[list[str], str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    said = []
    torch.manual_seed(rank)
    for step in range(4):
        x, bad = torch.randn(4, 8), rank == 3 and step == 1
        try:
            with stepper.forward():
                if bad and place == "before":
                    raise Unreadable("sample 7")
                value = model(x).square().mean()
                if bad and place == "after":
                    raise Unreadable("sample 7")
            stepper.backward(value)
            said.append(str(stepper.apply().applied))
        except (Unreadable, RankFailed) as error:
            said.append(f"{type(error).__name__} {error}".splitlines()[0])
    return said, digest_of(dict(model.named_parameters()))


@pytest.mark.wording
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_failure_in_the_callers_own_forward_pass(four: Ranks, place: str) -> None:
    found = four(own_forward, place)
    assert len({digest for _, digest in found}) == 1
    for rank, (said, _) in enumerate(found):
        words = "Unreadable sample 7" if rank == 3 else "RankFailed rank 3 failed in this window: Unreadable: sample 7"
        assert said == ["True", words, "True", "True"]


# -- parts trained in turns ----------------------------------------------------------------------------------------


def in_turns(rank: int) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 1)})
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    torch.manual_seed(rank)
    for step in range(6):
        model["g"].requires_grad_(step % 2 == 0)
        model["d"].requires_grad_(step % 2 == 1)
        assert stepper.step(lambda m, x: m["d"](m["g"](x)).square().mean(), torch.randn(4, 8)).applied
    return digest_of(model.state_dict()), type(stepper._synchronizer).__name__


def test_parts_that_are_trained_in_turns_are_not_wrapped_for_ever(four: Ranks) -> None:
    found = four(in_turns)
    assert set(found) == {(found[0][0], "AveragingSynchronizer")}


# -- a rank that is gone -------------------------------------------------------------------------------------------


def one_dies(rank: int) -> tuple[str, float]:
    stepper = stepper_for("DDP", buffers=True)
    stepper.step(loss, (batches(rank, 0)[0], ""))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    try:
        stepper.step(loss, (batches(rank, 1)[0], ""))
    except RankFailed as error:
        return f"{error.usable} {error}", time.monotonic() - since
    return "", 0.0


@pytest.mark.wording
def test_a_rank_that_dies_is_told_as_what_it_is() -> None:
    ranks = Ranks(2)
    try:
        ranks.begin(one_dies)
        alive, gone = ranks.outcomes()
    finally:
        ranks.stop()
    assert gone.failure == "ended by SIGKILL"
    words, seconds = alive.value
    assert words.startswith("False another rank is gone")
    assert seconds < 5


# -- votes and interrupts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "votes", [RankVotes(), RankVotes(1, 2, 3), RankVotes(stop=8_191), RankVotes(1, 8_000, 8_000, save=1)]
)
def test_votes_are_exact_in_one_number(votes: RankVotes) -> None:
    assert RankVotes.unpacked(float(votes.packed())) == votes
    # The most that fits beside it: every bit of a float64's exact integers is taken.
    flagged = RankVotes.unpacked(float(votes.packed()) + 8191 * 8192.0**3)
    assert flagged == replace(votes, bad_buffer=8191)
