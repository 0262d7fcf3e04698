"""What adds up over an epoch: cut anywhere, saved and loaded, it adds up to the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, ClasswiseWrapper, MeanMetric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassPrecision,
    MulticlassRecall,
)

from halfstep.checkpoint.packing import pack_state, unpack_state
from halfstep.errors import StateMismatch
from halfstep.step.report import StepReport
from halfstep.train.epoch_metrics import EpochMetrics
from tests.support.digest import digest_of


def report(loss: float, reason: str | None = None) -> StepReport:
    return StepReport(1, 1, reason is None, reason, True, loss, 1.0, 1.0, {})


def saved_and_loaded(tally: EpochMetrics) -> Any:
    plain, tensors = pack_state(tally.state_dict(), "epoch")
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return unpack_state(json.loads(json.dumps(plain, allow_nan=False)), copies, "here")


def grouped() -> MetricCollection:
    kinds = {"accuracy": MulticlassAccuracy, "precision": MulticlassPrecision, "recall": MulticlassRecall}
    return MetricCollection({name: kind(4, average="macro") for name, kind in kinds.items()})


def alone() -> MetricCollection:
    return MetricCollection({f"top{k}": MulticlassAccuracy(4, top_k=k) for k in (1, 2)}, compute_groups=False)


def mixed() -> MetricCollection:
    tops = {f"top{k}": MulticlassAccuracy(4, top_k=k, average="micro") for k in (1, 2)}
    return MetricCollection({**tops, "table": MulticlassConfusionMatrix(4)})


def wrapped() -> MetricCollection:
    return MetricCollection({"each": ClasswiseWrapper(MulticlassAccuracy(4, average=None))})


MAKERS: dict[str, Callable[[], MetricCollection]] = {
    "none": lambda: MetricCollection({}),
    "grouped": grouped,
    "alone": alone,
    "mixed": mixed,
    "wrapped": wrapped,
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    scores = [torch.rand(6, 4, generator=generator) for _ in range(5)]
    # The first batch is all right, whatever is asked.
    return [(s, s.argmax(1) if i == 0 else torch.randint(4, (6,), generator=generator)) for i, s in enumerate(scores)]


def add(tally: EpochMetrics, number: int) -> None:
    tally.metrics.update(*batches()[number])
    tally.add(report(0.1 * number, "loss_not_finite" if number == 2 else None))


@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("name", MAKERS)
def test_an_epoch_that_is_cut_adds_up_the_same(name: str, cut: int) -> None:
    whole, first, second = (EpochMetrics(MAKERS[name]()) for _ in range(3))
    for tally, numbers in ((whole, range(5)), (first, range(cut))):
        for number in numbers:
            add(tally, number)
    state = saved_and_loaded(first)
    second.check_state(state)
    second.load_state_dict(state)
    if cut:
        assert second.values() == first.values()
    for number in range(cut, 5):
        add(second, number)
    assert second.values() == whole.values()
    assert digest_of(second.state_dict()) == digest_of(whole.state_dict())
    assert (second.attempted, second.applied, dict(second.skipped)) == (5, 4, {"loss_not_finite": 1})


def test_what_counts_alike_is_not_decided_again_in_a_later_epoch() -> None:
    """Decided by what was counted first: where that looks the same by chance, two metrics are one from then on."""
    thresholds = {"low": 0.4, "high": 0.6}
    whole, second = (
        EpochMetrics(MetricCollection({name: BinaryAccuracy(threshold=at) for name, at in thresholds.items()}))
        for _ in range(2)
    )
    whole.metrics.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
    assert len(whole.metrics.compute_groups) == 1, "the first batch was meant to look the same to both"
    whole.reset()
    second.load_state_dict(saved_and_loaded(whole))
    for tally in (whole, second):
        tally.metrics.update(torch.tensor([0.5, 1.0]), torch.tensor([0, 1]))
        tally.add(report(0.5))
    assert second.values() == whole.values()
    assert second.metrics.compute_groups == whole.metrics.compute_groups


def test_states_that_are_lists_go_on_and_are_no_longer_shared() -> None:
    one, other = (EpochMetrics(MetricCollection({"all": CatMetric()})) for _ in range(2))
    for value in (1.0, 2.0):
        one.metrics.update(torch.tensor([value]))
    state = saved_and_loaded(one)
    other.load_state_dict(state)
    for tally in (one, other):
        tally.metrics.update(torch.tensor([3.0]))
        assert tally.metrics.compute()["all"].tolist() == [1.0, 2.0, 3.0]
    assert [t.tolist() for t in state["metrics"]["all"][""]["value"]] == [[1.0], [2.0]]


def test_loading_copies_and_a_reset_forgets() -> None:
    tally = EpochMetrics(grouped())
    add(tally, 0)
    state = saved_and_loaded(tally)
    before = digest_of(state)
    second = EpochMetrics(grouped())
    second.load_state_dict(state)
    add(second, 1)
    assert digest_of(state) == before
    second.reset()
    assert second.state_dict()["attempted"] == 0
    assert all(not part["tp"].any() for parts in second.state_dict()["metrics"].values() for part in parts.values())


def test_a_number_that_became_a_table_is_no_other_metric() -> None:
    one, other = (EpochMetrics(MetricCollection({"mean": MeanMetric()})) for _ in range(2))
    one.metrics["mean"].mean_value = torch.tensor([1.0, 2.0])
    other.check_state(saved_and_loaded(one))


OTHERS: dict[str, tuple[Callable[[], MetricCollection], Callable[[], MetricCollection]]] = {
    "another name": (alone, grouped),
    "none any more": (grouped, MAKERS["none"]),
    "none before": (MAKERS["none"], grouped),
    "more classes": (
        lambda: MetricCollection({"table": MulticlassConfusionMatrix(4)}),
        lambda: MetricCollection({"table": MulticlassConfusionMatrix(5)}),
    ),
    "lists for tensors": (
        lambda: MetricCollection({"auroc": BinaryAUROC()}),
        lambda: MetricCollection({"auroc": BinaryAUROC(thresholds=5)}),
    ),
    "wrapped before": (
        lambda: MetricCollection({"each": ClasswiseWrapper(MulticlassAccuracy(4, average=None))}),
        lambda: MetricCollection({"each": MulticlassAccuracy(4, average=None)}),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_other_metrics_is_refused(name: str) -> None:
    saved, own = (EpochMetrics(make()) for make in OTHERS[name])
    before = digest_of(own.state_dict())
    with pytest.raises(StateMismatch):
        own.check_state(saved_and_loaded(saved))
    assert digest_of(own.state_dict()) == before


@pytest.mark.wording
def test_a_state_without_a_part_is_refused() -> None:
    tally = EpochMetrics(grouped())
    for name in tally.state_dict():
        state = {key: value for key, value in tally.state_dict().items() if key != name}
        with pytest.raises(StateMismatch, match=name):
            tally.check_state(state)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "none"])
def test_what_a_skipped_step_said_is_taken_back_as_a_stepper_does_it(name: str) -> None:
    tally, plain = EpochMetrics(MAKERS[name]()), EpochMetrics(MAKERS[name]())
    for number in range(5):
        before = copy.deepcopy(tally.counts.state_dict())
        tally.metrics.update(*batches()[number])
        if number in (0, 3):
            tally.counts.load_state_dict(copy.deepcopy(before))
        else:
            plain.metrics.update(*batches()[number])
    assert tally.values()["loss"] != tally.values()["loss"]
    assert {k: v for k, v in tally.values().items() if k != "loss"} == pytest.approx(
        {k: v for k, v in plain.values().items() if k != "loss"}
    )


def test_lists_are_cut_back_and_never_copied() -> None:
    tally = EpochMetrics(MetricCollection({"all": CatMetric()}))
    tally.metrics.update(torch.tensor([1.0]))
    state = tally.counts.state_dict()
    assert not any(isinstance(value, list | torch.Tensor) for value in state[0].values())
    tally.metrics.update(torch.tensor([2.0]))
    tally.counts.load_state_dict(state)
    assert tally.metrics["all"].value == [torch.tensor([1.0])]
