"""Bad batches at awkward moments, and every kind of buffer that a forward pass may write."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    INF,
    NAN,
    Case,
    adamw,
    ce,
    flat,
    labelled,
    limit,
    loop,
    mlp,
    mse,
    named,
    normal,
    pairs,
    poisoned,
    promise,
    require,
    require_same,
    same,
    sgd,
    skips,
    trains,
)
from halfstep import DynamicScale, Ema, Stepper, StepReport, Window

BAD: dict[str, float] = {"nan": NAN, "inf": INF, "minus_inf": -INF}


def _full(precision: str = "fp32", **options: Any) -> Case:
    """BatchNorm, AdamW, a schedule and an average: everything that a step moves."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    optimizer = adamw(model)
    options = {"ema": Ema(model, 0.9), "clip_norm": 1.0, **options}
    case = Case(model, optimizer, mse, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1), options=options)
    case.start(precision=precision)
    return case


def _bad_at(value: float, precision: str) -> str:
    """At the first step (no optimizer state yet), later, and in the last micro-batch of a window."""
    case = _full(precision)
    batches = pairs(4)
    first = skips(case, poisoned(batches[0], value))
    trains(case, batches[:2])
    skips(case, poisoned(batches[2], value))
    skips(case, Window([*batches[:3], poisoned(batches[3], value)]))
    skips(case, Window([poisoned(batches[0], value), *batches[1:]]))
    trains(case, batches[2:])
    skipped = case.stepper.counts.skipped.total()
    require(case.stepper.counts.applied == 4 and skipped == 4, f"{case.stepper.counts}")
    return f"4 skips ({first.reason}), weights, AdamW, schedule, average and BatchNorm bitwise as before"


for _name, _value in BAD.items():
    for _precision in ("fp32", "bf16", "fp16"):
        named(f"{_name}_batches_{_precision}", partial(_bad_at, _value, _precision), "bad_batches")


# -- gradients that are bad while the loss is good ----------------------------------------------------------------


@loop
def nan_gradient_of_a_finite_loss() -> str:
    """`sqrt` of zero: the loss is fine, its gradient is NaN after multiplying by zero."""
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, adamw(model), lambda m, b: torch.sqrt((m(b[0]) * b[1]).square().sum()))
    case.start(clip_norm=1.0)
    trains(case, pairs(2))
    report = skips(case, (normal(8, 16), torch.zeros(8, 4)), ("gradient_not_finite",))
    require(math.isfinite(report.loss), "the loss was finite")
    return f"loss {report.loss}, skipped: {report.reason}"


@loop
def gradient_overflow_lowers_the_scale() -> str:
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, adamw(model), lambda m, b: mse(m, b) * 30.0)
    case.start(precision="fp16", loss_scale=DynamicScale(init_scale=2.0**24))
    report = skips(case, pairs(1)[0], ("gradient_overflow",))
    after = case.stepper.loss_scales
    require(next(iter(after.values())) == report.loss_scale / 2, f"{report.loss_scale} then {after}")
    return f"scale {report.loss_scale:g} then {after}"


@loop
def scale_never_reaches_zero() -> str:
    """Stock GradScaler halves to 0.0, and then writes NaN on the first clean batch."""
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, adamw(model), lambda m, b: mse(m, b))
    case.start(precision="fp16")
    nan_gradient = lambda m, b: torch.sqrt((m(b[0]) * 0.0).square().sum())  # noqa: E731
    before = case.state()
    reports = [case.stepper.step(nan_gradient, pairs(1)[0]) for _ in range(200)]
    require_same(before, case.state(), "after 200 skips")
    require(reports[-1].loss_scale > 0 and reports[-1].reason == "gradient_not_finite", str(reports[-1]))
    trains(case, pairs(2))
    return f"after 200 skips the scale is {reports[-1].loss_scale:g}, and a clean batch is applied"


@loop
def batch_norm_overflows_while_the_loss_is_finite() -> str:
    """running_var becomes inf although loss and gradients are finite: evaluation would be constant from here on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    case = Case(model, sgd(model), lambda m, b: m(b[0]).square().mean())
    case.start()
    trains(case, [(normal(8, 4),)])
    report = skips(case, (normal(8, 4) * 1e25,))
    require(report.reason in ("buffer_not_finite", "gradient_not_finite", "loss_not_finite"), str(report))
    return f"skipped: {report.reason}"


@loop
def one_bad_row_of_many() -> str:
    def build() -> Case:
        model = mlp(norm=True)
        return Case(model, adamw(model), ce)

    batches = labelled(3, n=32)
    bad = batches[0][0].clone()
    bad[17, 3] = NAN
    return promise(build, batches, (bad, batches[0][1]))


@loop
def all_labels_ignored() -> str:
    """cross_entropy over nothing is NaN: the epoch's last batch is all padding."""
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, adamw(model), lambda m, b: F.cross_entropy(m(b[0]), b[1], ignore_index=-100))
    case.start()
    skips(case, (normal(8, 16), torch.full((8,), -100)), ("loss_not_finite",))
    return "skipped: loss_not_finite"


@loop
def guard_refuses() -> str:
    class EveryOther:
        name = "every_other"
        same_on_all_ranks = True

        def passes(self, report: StepReport) -> bool:
            return report.attempt % 2 == 0

    case = _full(guards=[EveryOther()])
    for batch in pairs(4):
        skips(case, batch, ("guard:every_other",))
        trains(case, [batch])
    return "4 refusals bitwise undone, 4 applied"


@loop
def huge_but_finite_gradients() -> str:
    """Clipping from a norm of 1e15: still the direction, still finite."""
    torch.manual_seed(0)
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    stepper = Stepper(model, sgd(model, 1.0), precision="fp32", clip_norm=1.0)
    report = stepper.step(lambda m, b: mse(m, b) * 1e15, pairs(1)[0])
    moved = math.sqrt(sum((p - q).square().sum().item() for p, q in zip(model.parameters(), before, strict=True)))
    require(report.applied and abs(moved - 1.0) < 1e-3, f"{report}; moved by {moved}")
    return f"norm {report.grad_norm:.2g} clipped to {moved:.4f}"


@loop
def gradients_whose_norm_overflows() -> str:
    """torch's own norm of these is inf too: nothing could be clipped by it."""
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, sgd(model), lambda m, b: mse(m, b) * 1e30)
    case.start(clip_norm=1.0)
    report = skips(case, pairs(1)[0], ("gradient_not_finite",))
    return limit(
        "whose norm overflows fp32", f"loss {report.loss:.2g}, norm {report.grad_norm}, skipped: {report.reason}"
    )


# -- every kind of buffer -----------------------------------------------------------------------------------------


class Written(nn.Module):
    """A linear layer with one buffer that `write` changes in every forward."""

    def __init__(self, buffer: Any, write: Callable[[Any, Tensor], None], persistent: bool = True) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(16, 4), write
        self.register_buffer("held", buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return self.linear(x)


def _add(m: Any, x: Tensor) -> None:
    m.held.add_(1)


def _rebind(m: Any, x: Tensor) -> None:
    m.held = m.held + 1


def _data(m: Any, x: Tensor) -> None:
    m.held.data = m.held.data + 1


def _data_in_place(m: Any, x: Tensor) -> None:
    m.held.data.add_(1)


def _zero(m: Any, x: Tensor) -> None:
    m.held.mul_(0).add_(0.0)  # 0.0 where -0.0 was


def _resize(m: Any, x: Tensor) -> None:
    m.held = torch.cat([m.held, x.detach().mean(1)[:1]])


def _numpy(m: Any, x: Tensor) -> None:
    m.held.numpy()[...] += 1  # no version counter moves


def _swap_storage(m: Any, x: Tensor) -> None:
    m.held.set_(torch.full_like(m.held, 7.0))


def _or(m: Any, x: Tensor) -> None:
    m.held.logical_not_()


BUFFERS: dict[str, tuple[Callable[[], Tensor | None], Callable[[Any, Tensor], None]]] = {
    "float_in_place": (lambda: torch.zeros(5), _add),
    "long_counter": (lambda: torch.tensor(0), _add),
    "int8": (lambda: torch.zeros(3, dtype=torch.int8), _add),
    "bool": (lambda: torch.zeros(3, dtype=torch.bool), _or),
    "bfloat16": (lambda: torch.zeros(3, dtype=torch.bfloat16), _add),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), _add),
    "rebound": (lambda: torch.zeros(5), _rebind),
    "through_data": (lambda: torch.zeros(5), _data),
    "through_data_in_place": (lambda: torch.zeros(5), _data_in_place),
    "minus_zero": (lambda: torch.full((5,), -0.0), _zero),
    "grows": (lambda: torch.zeros(2), _resize),
    "through_numpy": (lambda: torch.zeros(5), _numpy),
    "set_storage": (lambda: torch.zeros(5), _swap_storage),
    "not_contiguous": (lambda: torch.zeros(6, 6).t()[::2], _add),
    "expanded": (lambda: torch.zeros(1).expand(4).clone().expand(3, 4), _rebind),
    "empty": (lambda: torch.zeros(0), _add),
    "large_in_place": (lambda: torch.zeros(2_200_000), _add),
}


def _buffer_loop(make: Callable[[], Any], write: Callable[[Any, Tensor], None], persistent: bool = True) -> str:
    def build() -> Case:
        model = Written(make(), write, persistent)
        return Case(model, sgd(model), mse)

    return promise(build, pairs())


for _name, (_make, _write) in BUFFERS.items():
    named(f"buffer_{_name}", partial(_buffer_loop, _make, _write), "bad_batches")
named("buffer_not_persistent", partial(_buffer_loop, lambda: torch.zeros(5), _rebind, False), "bad_batches")


@loop
def buffer_registered_in_forward() -> str:
    """A cache that is first registered in a forward: gone after a skip, there after an applied step."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", x.detach().mean(0))
            return self.linear(x - self.cache)

    def build() -> Case:
        model = Caching()
        return Case(model, sgd(model), mse)

    return promise(build, pairs())


@loop
def buffer_set_from_none() -> str:
    """`register_buffer("scale", None)`, set by the first batch (ActNorm, observers)."""

    def first(m: Any, x: Tensor) -> None:
        if m.held is None:
            m.held = x.detach().std(0)

    def build() -> Case:
        model = Written(None, first)
        return Case(model, sgd(model), mse)

    return promise(build, pairs())


@loop
def buffer_shared_by_two_modules() -> str:
    def build() -> Case:
        one, two = Written(torch.zeros(5), _add), Written(torch.zeros(5), _add)
        two.held = one.held
        model = nn.ModuleList([one, two])
        return Case(model, sgd(model), lambda m, b: mse(m[0], b) + mse(m[1], b))

    return promise(build, pairs())


@loop
def buffer_is_a_view_of_another() -> str:
    def build() -> Case:
        model = Written(torch.zeros(8), _add)
        model.register_buffer("part", model.held[2:5])
        return Case(model, sgd(model), mse)

    return promise(build, pairs())


@loop
def large_constant_masks() -> str:
    """24 causal masks of 1024 x 1024 are not written, and stay the very tensors that they were."""
    torch.manual_seed(0)
    model = mlp()
    for i in range(24):
        model.register_buffer(f"mask{i}", torch.ones(1024, 1024, dtype=torch.bool).tril_())
    places = [b.data_ptr() for b in model.buffers()]
    case = Case(model, sgd(model), mse)
    case.start()
    trains(case, pairs(2))
    case.stepper.step(mse, poisoned(pairs(1)[0]))
    require([b.data_ptr() for b in model.buffers()] == places, "a mask was moved")
    require(all(bool(b[5, 5]) and not bool(b[5, 6]) for b in model.buffers()), "a mask was changed")
    return "24 masks where they were and as they were"


@loop
def included_object_with_state_dict() -> str:
    """A running normalizer that is no module, covered by `include()`."""

    class Normaliser:
        def __init__(self) -> None:
            self.mean, self.count = torch.zeros(16), 0

        def __call__(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean = self.mean + (x.mean(0) - self.mean) / self.count
            return x - self.mean

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean, "count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean, self.count = state["mean"], state["count"]

    torch.manual_seed(0)
    model, normaliser = mlp(), Normaliser()
    case = Case(model, sgd(model), lambda m, b: mse(m, (normaliser(b[0]), b[1])), beside=[normaliser])
    case.start().include(normaliser)
    for batch in pairs():
        skips(case, poisoned(batch))
        trains(case, [batch])
    require(normaliser.count == 3, f"counted {normaliser.count}")
    return "3 skips taken back, 3 batches counted"


@loop
def included_module_that_nobody_holds() -> str:
    """A module reached through a registry of the framework, invisible to the loss function."""
    registry = {"stats": nn.BatchNorm1d(16)}

    def lookup() -> nn.Module:
        return registry["stats"]

    torch.manual_seed(0)
    model = mlp()
    case = Case(model, sgd(model), lambda m, b: mse(m, (_call(lookup, b[0]), b[1])), beside=[registry["stats"]])
    case.start().include(registry["stats"])
    for batch in pairs():
        skips(case, poisoned(batch))
        trains(case, [batch])
    return "3 skips taken back"


def _call(lookup: Callable[[], nn.Module], x: Tensor) -> Tensor:
    return lookup()(x)


@loop
def generators_of_the_random_state() -> str:
    """A skip leaves no trace in what is drawn next, or moves on as by hand: either way a seed decides."""
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 4))
        case = Case(model, sgd(model), mse)
        case.start()
        for batch in pairs():
            case.stepper.step(mse, poisoned(batch))
            trains(case, [batch])
        draws.append((torch.rand(4), dict(flat(model))))
    require(same(draws[0][0], draws[1][0]), "not repeatable")
    require_same(draws[0][1], draws[1][1], "not repeatable")
    return "two runs with bad batches under one seed are bitwise the same"
