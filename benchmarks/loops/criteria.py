"""Criteria with a memory: centers, class frequencies, weights of losses that follow the losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from benchmarks.loops.harness import (
    NAN,
    Case,
    Seen,
    adamw,
    labelled,
    limit,
    loop,
    mlp,
    poisoned,
    promise,
    promise_in_three_calls,
    require,
    sgd,
    skips,
    trains,
)

BATCHES = labelled(6)


def with_criterion(make: Callable[[], Any], *read: str) -> Callable[[], Case]:
    """A closure that holds the criterion; `read` are its attributes next to its parameters and buffers."""

    def build() -> Case:
        model, criterion = mlp(norm=True), make()
        seen = Seen(lambda: {name: getattr(criterion, name) for name in read})
        held = [criterion] if isinstance(criterion, nn.Module) else []
        return Case(model, adamw(model), lambda m, b: criterion(m(b[0]), b[1]), beside=[*held, seen])

    return build


class CentreLoss(nn.Module):
    """Centers of the classes, moved towards the batch by the criterion itself."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.randn(4, 4))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(z, y) + 0.1 * (z - self.centres[y]).square().mean()
        with torch.no_grad():
            for c in y.unique():
                self.centres[c] += 0.5 * (z[y == c].mean(0) - self.centres[c])
        return loss


@loop
def centre_loss() -> str:
    return promise(with_criterion(CentreLoss), BATCHES)


@loop
def centre_loss_in_three_calls() -> str:
    """No loss function is given to the Stepper; the criterion runs inside `stepper.forward()`."""
    return promise_in_three_calls(with_criterion(CentreLoss), BATCHES)


@loop
def centre_loss_with_centres_as_an_attribute() -> str:
    class Plain(CentreLoss):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.centres = torch.randn(4, 4)

    return promise(with_criterion(Plain, "centres"), BATCHES)


class PlainCentre:
    """DINO's center in an object that is no module; `update_` writes it in place."""

    def __init__(self) -> None:
        self.centre = torch.zeros(4)

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(z - self.centre, y)
        self.centre.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return loss


@loop
def centre_of_a_plain_object_in_place() -> str:
    return promise(with_criterion(PlainCentre, "centre"), BATCHES)


@loop
def centre_of_a_plain_object_in_bf16() -> str:
    return promise(with_criterion(PlainCentre, "centre"), BATCHES, precision="bf16")


@loop
def centre_of_a_bound_method_in_a_dict() -> str:
    """`losses["centre"] = plain.__call__`, with its weight next to it."""

    def build() -> Case:
        model, plain = mlp(), PlainCentre()
        losses = {"centre": (plain.__call__, 1.0)}

        def loss(m: nn.Module, b: Any) -> Tensor:
            return sum(weight * fn(m(b[0]), b[1]) for fn, weight in losses.values())  # type: ignore[return-value]

        return Case(model, adamw(model), loss, beside=[plain.centre])

    return promise(build, BATCHES)


@loop
def centre_under_an_island() -> str:
    """`halfstep.island(criterion)` in bf16: its buffer is restored, too."""
    return promise(with_criterion(lambda: halfstep.island(CentreLoss())), BATCHES, precision="bf16")


@loop
def class_frequencies_for_a_balanced_loss() -> str:
    """Counts of labels are finite whatever the inputs: a NaN batch must not be counted."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.seen = torch.ones(4, dtype=torch.long), 0

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            self.counts += torch.bincount(y, minlength=4)
            self.seen += len(y)
            return F.cross_entropy(z, y, weight=self.seen / self.counts)

    return promise(with_criterion(Balanced, "counts", "seen"), BATCHES)


@loop
def logit_adjustment_in_a_function_attribute() -> str:
    """`loss.prior`, a tensor that hangs on the function itself and is written in place."""

    def build() -> Case:
        model = mlp()

        def loss(m: nn.Module, b: Any) -> Tensor:
            loss.prior.lerp_(torch.bincount(b[1], minlength=4) / len(b[1]), 0.1)  # type: ignore[attr-defined]
            return F.cross_entropy(m(b[0]) + (loss.prior + 1e-3).log(), b[1])  # type: ignore[attr-defined]

        loss.prior = torch.full((4,), 0.25)  # type: ignore[attr-defined]
        return Case(model, adamw(model), loss, beside=[loss.prior])  # type: ignore[attr-defined]

    return promise(build, BATCHES)


@loop
def weights_of_losses_by_their_running_means() -> str:
    """Each loss is divided by its running mean, tensors in a dict."""

    def build() -> Case:
        model = mlp()
        means = {"class": torch.ones(()), "size": torch.ones(())}

        def loss(m: nn.Module, b: Any) -> Tensor:
            z = m(b[0])
            terms = {"class": F.cross_entropy(z, b[1]), "size": z.square().mean()}
            for name, term in terms.items():
                means[name].mul_(0.9).add_(0.1 * term.detach())
            return sum(term / means[name].clone() for name, term in terms.items())  # type: ignore[return-value]

        return Case(model, adamw(model), loss, beside=[means])

    return promise(build, BATCHES)


@loop
def dynamic_weight_averaging_of_floats() -> str:
    """Weights by the ratio of the last two losses, as Python floats and tuples of a module."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.before, self.weights = (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            terms = (F.cross_entropy(z, y), z.square().mean())
            rates = [math.exp(a / b / 2) for a, b in zip(self.last, self.before, strict=True)]
            self.weights = tuple(2 * r / sum(rates) for r in rates)  # type: ignore[assignment]
            self.before, self.last = self.last, tuple(float(t) for t in terms)  # type: ignore[assignment]
            return self.weights[0] * terms[0] + self.weights[1] * terms[1]

    return promise(with_criterion(Averaging, "last", "before", "weights"), BATCHES)


@loop
def running_loss_as_a_float_of_a_plain_object() -> str:
    """A Python float of a plain object: not restored, as documented."""

    class Normalised:
        def __init__(self) -> None:
            self.mean = 1.0

        def __call__(self, z: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(z, y)
            self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
            return loss

    torch.manual_seed(0)
    model, criterion = mlp(), Normalised()
    case = Case(model, adamw(model), lambda m, b: criterion(m(b[0]), b[1]))
    case.start()
    trains(case, BATCHES[:2])
    skips(case, (BATCHES[0][0] * NAN, BATCHES[0][1]))
    require(math.isnan(criterion.mean), f"the mean is {criterion.mean}")
    return limit("Python values outside of modules", "a float of a plain object is NaN after the skip")


@loop
def margin_that_grows_with_each_call() -> str:
    """ArcFace with a margin that is annealed, and weights of its own in the optimizer."""

    class Arc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.margin = nn.Parameter(torch.randn(4, 4)), 0.0

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            cosine = F.linear(F.normalize(z), F.normalize(self.weight)).clamp(-0.999, 0.999)
            self.margin = min(0.5, self.margin + 0.1)
            hit = torch.cos(torch.acos(cosine) + self.margin)
            return F.cross_entropy(8 * torch.where(F.one_hot(y, 4).bool(), hit, cosine), y)

    def build() -> Case:
        model, arc = mlp(), Arc()
        optimizer = torch.optim.SGD([*model.parameters(), *arc.parameters()], lr=0.1)
        seen = Seen(lambda: {"margin": arc.margin})
        return Case(model, optimizer, lambda m, b: arc(m(b[0]), b[1]), beside=[arc, seen])

    return promise(build, BATCHES)


@loop
def deferred_reweighting_after_a_warm_up() -> str:
    """LDAM-DRW: a second phase from the fourth call on, `self.phase` a string and its weights a tuple."""

    class Deferred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.phase, self.weights = 0, "plain", (1.0, 1.0, 1.0, 1.0)

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                self.phase, self.weights = "balanced", tuple(1 / (1 + i) for i in range(4))  # type: ignore[assignment]
            return F.cross_entropy(z, y, weight=torch.tensor(self.weights))

    return promise(with_criterion(Deferred, "calls", "phase", "weights"), BATCHES, at=(0, 3, 3, 5))


@loop
def criterion_as_an_argument_of_a_partial() -> str:
    def loss(criterion: nn.Module, m: nn.Module, b: Any) -> Tensor:
        return criterion(m(b[0]), b[1])

    def build() -> Case:
        model, criterion = mlp(), CentreLoss()
        return Case(model, adamw(model), functools.partial(loss, criterion), beside=[criterion])

    return promise(build, BATCHES)


@loop
def temperature_tuned_by_the_loss_itself() -> str:
    """CLIP's logit scale, clamped in place through `.data` by the loss function."""

    def build() -> Case:
        model = nn.ModuleDict({"a": mlp(16, 16, 8), "b": mlp(16, 16, 8)})
        scale = nn.Parameter(torch.tensor(4.7))
        optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)

        def loss(m: Any, b: Any) -> Tensor:
            scale.data.clamp_(0, math.log(100))
            a, c = F.normalize(m["a"](b[0])), F.normalize(m["b"](b[0].flip(1)))
            return F.cross_entropy(scale.exp() * a @ c.T, torch.arange(len(a)))

        return Case(model, optimizer, loss, beside=[scale])

    return promise(build, BATCHES)


@loop
def perceptual_loss_with_running_normalisation() -> str:
    """A frozen feature network with BatchNorm in train mode, inside a criterion, inside a list."""

    class Perceptual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = mlp(4, 8, 8, norm=True).requires_grad_(False)

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.features(z), self.features(F.one_hot(y, 4).float()))

    def build() -> Case:
        model, losses = mlp(), [Perceptual()]
        return Case(model, sgd(model), lambda m, b: losses[0](m(b[0]), b[1]), beside=[losses[0]])

    return promise(build, BATCHES)


@loop
def loss_that_keeps_the_worst_batch() -> str:
    """Hard example mining: the batch with the highest loss so far, copied into tensors of a plain dict."""

    def build() -> Case:
        model = mlp()
        worst = {"loss": torch.zeros(()), "x": torch.zeros(8, 16)}

        def loss(m: nn.Module, b: Any) -> Tensor:
            value = F.cross_entropy(m(b[0]), b[1])
            if not float(value) <= float(worst["loss"]):
                worst["loss"].copy_(value.detach())
                worst["x"].copy_(b[0])
            return value + 0.1 * m(worst["x"].clone()).square().mean()

        return Case(model, adamw(model), loss, beside=[worst])

    return promise(build, BATCHES, poisoned(BATCHES[0]))
