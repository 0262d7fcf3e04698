"""FG-ARI and mBO: against torchmetrics' own index, cases by hand, and what chance gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchmetrics.functional.clustering import adjusted_rand_score

from halfstep.tasks.slots import BestOverlap, ForegroundAri
from halfstep.train.metrics import Metrics

SLOTS = 5


def clips(seed: int, count: int = 3) -> tuple[Tensor, Tensor]:
    """Slots that follow things more or less, over four frames."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 5, (count, 4, 12, 10), generator=generator)
    noise = torch.randint(0, SLOTS, truth.shape, generator=generator)
    follow = torch.rand(truth.shape, generator=generator) < torch.linspace(0.2, 0.9, count).view(-1, 1, 1, 1)
    return torch.where(follow, (truth + 2) % SLOTS, noise), truth.to(torch.uint8)


def of(kind: type, said: Tensor, truth: Tensor, slots: int = SLOTS) -> float:
    metric = kind(slots)
    metric.update(said, truth)
    return float(metric.compute())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_that_of_torchmetrics_over_the_foreground(seed: int) -> None:
    said, truth = clips(seed)
    each = [adjusted_rand_score(s[t > 0], t[t > 0].long()) for s, t in zip(said, truth, strict=True)]
    assert of(ForegroundAri, said, truth) == pytest.approx(float(torch.stack(each).double().mean()), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_overlap_is_that_of_sets(seed: int) -> None:
    said, truth = clips(seed)
    scores = []
    for s, t in zip(said, truth, strict=True):
        things = [t == n for n in t.unique().tolist() if n]
        each = [max(float((a & (s == k)).sum() / (a | (s == k)).sum()) for k in range(SLOTS)) for a in things]
        scores.append(sum(each) / len(each))
    assert of(BestOverlap, said, truth) == pytest.approx(sum(scores) / len(scores), abs=1e-6)


def test_a_perfect_division_is_one_whatever_the_slots_are_called() -> None:
    _, truth = clips(0)
    renamed = torch.tensor([3, 0, 4, 2, 1])[truth.long()]
    assert of(ForegroundAri, renamed, truth) == pytest.approx(1.0, abs=1e-11)
    assert of(BestOverlap, renamed, truth) == pytest.approx(1.0, abs=1e-11)


def test_the_background_counts_for_the_overlap_and_not_for_the_index() -> None:
    _, truth = clips(0)
    said = truth.long()
    spilled = torch.where((truth == 0) & (torch.rand(truth.shape) < 0.5), 1, said)
    assert of(ForegroundAri, spilled, truth) == pytest.approx(1.0, abs=1e-11)
    assert of(BestOverlap, spilled, truth) < 0.95


def test_a_slot_must_stay_on_its_thing_over_time() -> None:
    """Each frame is divided perfectly, and the slots change places between two frames."""
    truth = torch.tensor([1, 1, 2, 2]).repeat(2, 1).view(1, 2, 2, 2)
    said = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]).view(1, 2, 2, 2)
    assert of(ForegroundAri, said[:, :1], truth[:, :1], 2) == 1.0
    assert of(ForegroundAri, said, truth, 2) < 0.0
    assert of(BestOverlap, said, truth, 2) == pytest.approx(1 / 3)


def test_chance_gives_about_nothing() -> None:
    said = torch.randint(0, 7, (8, 6, 32, 32), generator=torch.Generator().manual_seed(0))
    truth = torch.randint(0, 5, (8, 1, 4, 4), generator=torch.Generator().manual_seed(1))
    truth = truth.repeat_interleave(8, 2).repeat_interleave(8, 3).expand(-1, 6, -1, -1)
    assert abs(of(ForegroundAri, said, truth, 7)) < 0.01


@pytest.mark.parametrize(
    ("said", "truth", "index", "overlap"),
    [
        ([0, 0, 0, 0], [1, 1, 1, 1], 1.0, 1.0),  # one thing, one slot
        ([0, 0, 1, 1], [1, 1, 1, 1], 0.0, 0.5),  # one thing, two slots
        ([0, 0, 0, 0], [1, 1, 2, 2], 0.0, 0.5),  # two things, one slot
        ([0, 1, 2, 3], [1, 2, 3, 4], 1.0, 1.0),  # a pixel each
        ([0, 1, 1, 1], [0, 9, 0, 0], 1.0, 1 / 3),  # a single pixel of a thing
    ],
)
def test_small_cases(said: list[int], truth: list[int], index: float, overlap: float) -> None:
    a, b = torch.tensor(said).view(1, 1, 2, 2), torch.tensor(truth).view(1, 1, 2, 2)
    assert of(ForegroundAri, a, b) == pytest.approx(index, abs=1e-11)
    assert of(BestOverlap, a, b) == pytest.approx(overlap, abs=1e-11)


@pytest.mark.parametrize("kind", [ForegroundAri, BestOverlap])
def test_clips_with_nothing_in_them_do_not_count(kind: type) -> None:
    said, truth = clips(1)
    assert math.isnan(of(kind, said, torch.zeros_like(truth)))
    expected = of(kind, said, truth)
    metric = kind(SLOTS)
    metric.update(said, torch.zeros_like(truth))
    metric.update(said, truth)
    assert float(metric.compute()) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("kind", [ForegroundAri, BestOverlap])
def test_batches_may_be_cut_anywhere(kind: type) -> None:
    said, truth = clips(2, 7)
    metric = kind(SLOTS)
    for part in (slice(0, 1), slice(1, 5), slice(5, 7)):
        metric.update(said[part], truth[part])
    assert float(metric.compute()) == pytest.approx(of(kind, said, truth), abs=1e-11)
    metric.reset()
    metric.update(said, torch.zeros_like(truth))
    assert math.isnan(float(metric.compute()))


def test_in_a_collection_each_keeps_its_own_sum() -> None:
    """Also where both are equal after the first batch, which is perfect."""
    _, truth = clips(0)
    together = Metrics({"fg_ari": ForegroundAri(SLOTS), "mbo": BestOverlap(SLOTS)})
    together.update(truth.long(), truth)
    said, other = clips(3)
    together.update(said, other)
    found = {name: float(value) for name, value in together.compute().items()}
    assert found["fg_ari"] == pytest.approx((1 + of(ForegroundAri, said, other)) / 2, abs=1e-11)
    assert found["mbo"] == pytest.approx((1 + of(BestOverlap, said, other)) / 2, abs=1e-11)
    assert found["fg_ari"] != found["mbo"]


def test_large_clips_are_counted_exactly() -> None:
    """Pairs of pixels go beyond what fp32 can count."""
    truth = torch.zeros(1, 24, 128, 128, dtype=torch.uint8)
    truth[..., :64] = 1
    truth[..., 64:] = 2
    said = truth.long() - 1
    said[0, 0, 0, 0] = 1
    score = of(ForegroundAri, said, truth, 2)
    assert 1 - 2e-5 < score < 1 - 1e-6
