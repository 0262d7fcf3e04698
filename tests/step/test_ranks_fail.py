"""One rank fails: every rank gives the window up at once, nothing moves, and everybody knows who it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from halfstep import Stepper
from tests.support.combinations import pairwise
from tests.support.failing import PLACES, attempted, batches, local_digest, loss, stepper_for
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
SECONDS = 5.0


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)], ids=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.stop()


def good_steps(stepper: Stepper, rank: int, steps: range) -> None:
    for step in steps:
        assert stepper.step(loss, (batches(rank, step)[0], "")).applied


def one_fails(
    rank: int, kind: str, buffers: bool, place: str, microbatches: int = 1, bad: int = 0, first: bool = False
) -> dict[str, Any]:
    """The last rank fails in its second window (or its first); then training goes on as if nothing had been."""
    guilty = is_guilty(rank)
    stepper = stepper_for(kind, buffers)
    if not first:
        good_steps(stepper, rank, range(2))
    found = attempted(stepper, rank, 7, place if guilty else "", microbatches, bad)
    if found["usable"] is False or found.get("notes"):
        return found
    good_steps(stepper, rank, range(2, 4))
    found["after"] = local_digest(stepper)
    undisturbed = stepper_for(kind, buffers)
    good_steps(undisturbed, rank, range(2, 4) if first else range(4))
    found["undisturbed"] = local_digest(undisturbed)
    return found


def is_guilty(rank: int) -> bool:
    import torch.distributed as dist

    return rank == dist.get_world_size() - 1


def check(found: list[dict[str, Any]], error: str, words: str) -> None:
    guilty = len(found) - 1
    assert [one["error"] for one in found] == ["RankFailed"] * guilty + [error]
    for one in found[:-1]:
        assert one["rank"] == guilty
        assert f"rank {guilty} failed" in one["words"]
        assert error in one["words"]
        assert words in one["words"]
    assert max(one["seconds"] for one in found) < SECONDS
    assert all(one["unchanged"] for one in found)


@pytest.mark.wording
@pytest.mark.parametrize(*pairwise(kind=["DDP", "FSDP2"], buffers=[False, True], place=PLACES))
def test_one_rank_fails_and_training_goes_on(ranks: Ranks, kind: str, buffers: bool, place: str) -> None:
    check_that_training_goes_on(ranks(one_fails, kind, buffers, place), kind, place)


@pytest.mark.wording
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_one_rank_of_four_fails_and_training_goes_on(four_ranks: Ranks, kind: str, place: str) -> None:
    check_that_training_goes_on(four_ranks(one_fails, kind, True, place), kind, place)


def check_that_training_goes_on(found: list[dict[str, Any]], kind: str, place: str) -> None:
    error, words = ("KeyboardInterrupt", "") if place == "Ctrl-C" else ("Unreadable", "sample 7")
    check(found, error, words)
    assert all(one["usable"] for one in found[:-1])
    assert "is usable" in found[0]["words"]
    if (kind, place) != ("DDP", "in backward"):  # where buckets were made anew, and four numbers summed in other orders
        assert all(one["after"] == one["undisturbed"] for one in found)


@pytest.mark.wording
@pytest.mark.parametrize(*pairwise(kind=["FSDP2", "DDP"], place=["in backward", "after the model"], bad=[0, 1, 2]))
def test_a_micro_batch_of_a_window_fails(ranks: Ranks, kind: str, place: str, bad: int) -> None:
    found = ranks(one_fails, kind, True, place, 3, bad)
    # Before this window there was none of several micro-batches: which gathers its backward has, nobody has seen.
    unseen = kind == "FSDP2" and place == "in backward" and bad == 0
    if unseen:
        ranks.stop()
    check(found, "Unreadable", "sample 7")
    assert [one["usable"] for one in found[:-1]] == [not unseen] * (len(found) - 1)


@pytest.mark.wording
@pytest.mark.parametrize("place", ["before the model", "in backward"])
def test_the_very_first_window_fails_under_ddp(ranks: Ranks, place: str) -> None:
    found = ranks(one_fails, "DDP", True, place, first=True)
    check(found, "Unreadable", "sample 7")
    assert "after" in found[0]


@pytest.mark.wording
@pytest.mark.parametrize(
    "place", ["in forward", *(pytest.param(place, marks=pytest.mark.full) for place in ("before the model", "Ctrl-C"))]
)
def test_the_very_first_window_fails_under_fsdp2_and_the_group_is_lost(ranks: Ranks, place: str) -> None:
    found = ranks(one_fails, "FSDP2", True, place, first=True)
    ranks.stop()  # the group cannot be used, as every rank says
    check(found, "KeyboardInterrupt" if place == "Ctrl-C" else "Unreadable", "")
    assert not any(one["usable"] for one in found[:-1])
    assert all("no longer usable" in one["words"] for one in found[:-1])
    assert any("no longer usable" in note for note in found[-1]["notes"])


def started(rank: int, spoilt: bool) -> dict[str, Any]:
    """The first window with a start check in bf16; the last rank loses a gradient in it if `spoilt`."""
    import torch

    from halfstep.errors import HalfstepError
    from halfstep.precision.precision import resolve_precision_name
    from tests.support.digest import digest_of
    from tests.support.models import plain_model

    model = plain_model()
    before = digest_of(model.state_dict())
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("bf16"), check=True
    )

    def loss_fn(model: Any, batch: Any) -> Any:
        lost = spoilt and is_guilty(rank) and torch.is_autocast_enabled("cpu")
        hidden = model[1](model[0](batch))
        return model[2](hidden.detach() if lost else hidden).float().square().mean()

    error = ""
    try:
        stepper.step(loss_fn, batches(rank, 0)[0])
    except HalfstepError as failed:
        error = failed.id
    weights = digest_of(model.state_dict())
    return {"error": error, "changed": weights != before, "weights": weights}


def test_a_start_check_that_refuses_on_one_rank_stops_all(ranks: Ranks) -> None:
    fine = ranks(started, False)
    assert [one["error"] for one in fine] == [""] * len(fine)
    assert all(one["changed"] for one in fine)
    assert len({one["weights"] for one in fine}) == 1
    refused = ranks(started, True)
    assert [one["error"] for one in refused] == ["rank-failed"] * (len(refused) - 1) + ["start.no_gradient"]
    assert not any(one["changed"] for one in refused)
