"""Metrics that count inside a step: torchmetrics and meters of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    flat,
    in_three_calls,
    labelled,
    limit,
    loop,
    mlp,
    normal,
    pairs,
    poisoned,
    promise,
    require,
    require_same,
    skips,
    trains,
)

BATCHES = labelled(5)


def states(metric: torchmetrics.Metric) -> Seen:
    """The states of a metric and how often it was updated."""
    return Seen(lambda: {"count": metric._update_count, **{n: getattr(metric, n) for n in metric._defaults}})


def counted(metric: torchmetrics.Metric, includes: bool, form: Callable[[Case, Any], Any] | None = None) -> str:
    """The metric sees the batches of applied steps, and no other: equal to a metric that only saw those."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    wanted = metric.clone()

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        metric.update(out.detach().softmax(-1), b[1])
        wanted_inputs.append((out.detach().softmax(-1), b[1]))
        return F.cross_entropy(out, b[1])

    wanted_inputs: list[Any] = []
    case = Case(model, adamw(model), loss, beside=[states(metric)])
    stepper = case.start()
    if includes:
        stepper.include(metric)
    for batch in BATCHES:
        bad = (normal(8, 16).mul(float("nan")), batch[1])
        before = case.state()
        if form is None:
            skips(case, bad)
            wanted_inputs.clear()
            trains(case, [batch])
        else:
            require(not form(case, bad).applied, "a bad batch was applied")
            require_same(before, case.state(), "after a skip")
            wanted_inputs.clear()
            require(form(case, batch).applied, "not applied")
        wanted.update(*wanted_inputs[-1])
    require_same(dict(flat(states(wanted))), dict(flat(states(metric))), "compared with a metric of the applied steps")
    require(torch.equal(wanted.compute(), metric.compute()), f"{metric.compute()}, not {wanted.compute()}")
    return f"5 of 10 batches counted: {metric.compute()}"


@loop
def accuracy_that_is_included() -> str:
    return counted(MulticlassAccuracy(4, validate_args=False), includes=True)


@loop
def confusion_matrix_that_is_included_in_three_calls() -> str:
    metric = MulticlassConfusionMatrix(4, validate_args=False)
    return counted(metric, includes=True, form=in_three_calls)


@loop
def auroc_with_lists_that_is_included() -> str:
    """Its states are lists of all predictions so far: a shallow copy takes the last ones off."""
    return counted(MulticlassAUROC(4, thresholds=None, average="macro", validate_args=False), includes=True)


@loop
def mean_of_losses_as_a_forward_call() -> str:
    """`metric(value)` instead of `update`: torchmetrics saves, resets and merges its states in one call."""

    def build() -> Case:
        model, mean = mlp(), torchmetrics.MeanMetric(nan_strategy="disable")

        def loss(m: nn.Module, b: Any) -> Tensor:
            value = F.cross_entropy(m(b[0]), b[1])
            mean(value.detach())
            return value

        return Case(model, adamw(model), loss, beside=[states(mean)])

    return promise(build, BATCHES)


@loop
def metric_collection_that_is_included() -> str:
    torch.manual_seed(0)
    model = mlp()
    metrics = torchmetrics.MetricCollection(
        {"accuracy": MulticlassAccuracy(4), "matrix": MulticlassConfusionMatrix(4)}, compute_groups=False
    )

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        metrics.update(out.detach().argmax(-1), b[1])
        return F.cross_entropy(out, b[1])

    case = Case(model, adamw(model), loss, beside=[states(m) for m in metrics.values()])
    case.start().include(metrics)
    for batch in BATCHES:
        skips(case, (batch[0] * float("nan"), batch[1]))
        trains(case, [batch])
    total = int(metrics.compute()["matrix"].sum())
    require(total == 40, f"{total} samples counted, not 40")
    return "40 samples of 5 applied batches"


@loop
def metric_inside_the_model_is_reset_each_epoch() -> str:
    """A metric as a submodule, reset by the loop between epochs: the reset is not taken back by a skip."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.error = mlp(16, 8, 4), torchmetrics.MeanSquaredError()

        def forward(self, b: Any) -> Tensor:
            out = self.net(b[0])
            self.error.update(out.detach(), b[1])
            return F.mse_loss(out, b[1])

    torch.manual_seed(0)
    model = Net()
    case = Case(model, adamw(model), lambda m, b: m(b), beside=[states(model.error)])
    case.start().include(model.error)
    for _ in range(3):
        trains(case, pairs(2))
        model.error.reset()
        skips(case, poisoned(pairs(1)[0]))
        require(model.error._update_count == 0, "the skip brought back what the loop had reset")
    return "3 epochs, 3 skips right after the reset"


@loop
def meter_of_tensors_in_a_plain_object() -> str:
    """An AverageMeter whose sum is a tensor written in place, to avoid a read of the device."""

    class Meter:
        def __init__(self) -> None:
            self.total, self.n = torch.zeros(()), torch.zeros((), dtype=torch.long)

        def add(self, value: Tensor, n: int) -> None:
            self.total += value.detach() * n
            self.n += n

    def build() -> Case:
        model, meter = mlp(), Meter()

        def loss(m: nn.Module, b: Any) -> Tensor:
            value = F.cross_entropy(m(b[0]), b[1])
            meter.add(value, len(b[1]))
            return value

        return Case(model, adamw(model), loss, beside=[Seen(lambda: vars(meter))])

    return promise(build, BATCHES)


@loop
def meter_of_floats_in_a_plain_object() -> str:
    torch.manual_seed(0)
    model, history = mlp(), []

    def loss(m: nn.Module, b: Any) -> Tensor:
        value = F.cross_entropy(m(b[0]), b[1])
        history.append(float(value.detach()))
        return value

    case = Case(model, adamw(model), loss)
    case.start()
    trains(case, BATCHES[:2])
    skips(case, (BATCHES[0][0] * float("nan"), BATCHES[0][1]))
    require(len(history) == 3, f"{len(history)} numbers")
    return limit("Update Python values only if `report.applied` is true", "a list of floats has the skipped loss")
