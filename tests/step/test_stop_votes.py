"""A wish to stop, raised by one process, is known to all of them after the same step, and costs no collective."""

from __future__ import annotations

import pytest
import torch

from halfstep import Stepper
from halfstep.precision.precision import resolve_precision_name
from tests.step.test_ranks import Counted, mse
from tests.support.digest import digest_of
from tests.support.models import buffered_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def trained(rank: int, raised_by: list[list[int]], bad: int | None = None) -> tuple[list[int], int, str]:
    """Hands seen after each step, collectives, and the weights; `raised_by` says whose hand is up at each step."""
    model = buffered_model(seed=0)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("fp32"))
    counted = Counted()
    seen = []
    torch.manual_seed(rank)
    for step, ranks in enumerate(raised_by):
        stepper.stop_requested = rank in ranks
        stepper.step(mse, torch.randn(6, 8) * (float("nan") if step == bad else 1.0))
        seen.append(stepper.stop_votes)
    counted.stop()
    return seen, len(counted.calls), digest_of(dict(model.named_parameters()))


def test_one_process_sees_its_own_hand() -> None:
    assert trained(0, [[], [0], []])[0] == [0, 1, 0]


def test_every_rank_counts_the_same_hands_at_the_same_step(on_ranks: Ranks) -> None:
    found = on_ranks(trained, [[], [1], [0, 1], [0], []])
    assert [seen for seen, _, _ in found] == [[0, 1, 2, 1, 0]] * 2
    assert [calls for _, calls, _ in found] == [5, 5]


def test_a_hand_changes_no_bit_and_is_seen_on_a_skipped_step_too(on_ranks: Ranks) -> None:
    raised = on_ranks(trained, [[], [1], [0]], 1)
    quiet = on_ranks(trained, [[], [], []], 1)
    assert [seen for seen, _, _ in raised] == [[0, 1, 1]] * 2
    assert [weights for _, _, weights in raised] == [weights for _, _, weights in quiet]


def saving(rank: int, raised_by: list[list[int]]) -> tuple[list[bool], list[int], int, str]:
    """Whether all save after each step, the hands seen, collectives, and the weights."""
    model = buffered_model(seed=0)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("fp32"))
    counted, agreed, hands = Counted(), [], []
    torch.manual_seed(rank)
    for ranks in raised_by:
        stepper.save_requested = rank in ranks
        stepper.stop_requested = rank == 1
        stepper.step(mse, torch.randn(6, 8))
        agreed.append(stepper.save_agreed)
        hands.append(stepper.stop_votes)
    counted.stop()
    return agreed, hands, len(counted.calls), digest_of(dict(model.named_parameters()))


def test_one_process_saves_when_it_asks_itself() -> None:
    assert saving(0, [[], [0], []])[0] == [False, True, False]


def test_rank_zero_alone_decides_on_a_save_and_all_hear_of_it_in_the_same_step(on_ranks: Ranks) -> None:
    found = on_ranks(saving, [[], [0], [0, 1], [1], []])
    assert [agreed for agreed, _, _, _ in found] == [[False, True, True, False, False]] * 2
    assert [(hands, calls) for _, hands, calls, _ in found] == [([1] * 5, 5)] * 2
    quiet = on_ranks(saving, [[]] * 5)
    assert [weights for *_, weights in found] == [weights for *_, weights in quiet]
