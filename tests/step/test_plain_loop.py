"""fp32 without guards is the plain loop, to the bit; and micro-batches add up to the batch they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import DynamicScale, Stepper, Window, windows
from halfstep.errors import WrongUse
from tests.step.test_skip import OPTIMIZERS
from tests.support.digest import digest_of
from tests.support.models import buffered_model, plain_model

Batch = tuple[Tensor, Tensor]


def data(steps: int, size: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(steps)
    ]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(F.dropout(model(batch[0]), 0.2), batch[1])


def plain_loop(make: Callable[[Any], torch.optim.Optimizer], clip: float | None, microbatches: int) -> str:
    model = buffered_model()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    losses = []
    torch.manual_seed(1)
    for batch in windows(data(50 * microbatches), microbatches):
        for micro in batch:
            loss = loss_fn(model, micro) / microbatches
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return digest_of(model.state_dict(), optimizer.state_dict(), schedule.state_dict())


def with_stepper(make: Callable[[Any], torch.optim.Optimizer], clip: float | None, microbatches: int) -> str:
    model = buffered_model()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    stepper = Stepper(model, optimizer, precision="fp32", clip_norm=clip, schedule=schedule)
    torch.manual_seed(1)
    reports = [stepper.step(loss_fn, window) for window in windows(data(50 * microbatches), microbatches)]
    assert len(reports) == reports[-1].step == 50
    return digest_of(model.state_dict(), optimizer.state_dict(), schedule.state_dict())


CLIPS = {"unclipped": None, "clipped": 0.05, "hardly_clipped": 100.0}
IN_CI = {
    ("sgd_momentum", "unclipped", 1),
    ("sgd_momentum_fused", "clipped", 1),
    ("adamw", "hardly_clipped", 1),
    ("adamw_fused", "clipped", 1),
    ("adafactor", "unclipped", 1),
    ("sgd_momentum", "unclipped", 3),
    ("sgd_momentum_fused", "clipped", 4),
    ("adamw", "hardly_clipped", 3),
    ("adamw_fused", "unclipped", 4),
    ("adafactor", "clipped", 3),
    ("adafactor", "hardly_clipped", 4),
}
"""Every optimizer, clipping and length of a window; the other combinations run with --full."""


@pytest.mark.parametrize(
    ("optimizer", "clip", "microbatches"),
    [
        pytest.param(
            optimizer,
            CLIPS[clip],
            microbatches,
            id=f"{optimizer}-{clip}-{microbatches}",
            marks=() if (optimizer, clip, microbatches) in IN_CI else pytest.mark.full,
        )
        for optimizer in OPTIMIZERS
        for clip in CLIPS
        for microbatches in (1, 3, 4)
    ],
)
def test_fifty_steps_are_bitwise_equal(optimizer: str, clip: float | None, microbatches: int) -> None:
    make = OPTIMIZERS[optimizer]
    assert with_stepper(make, clip, microbatches) == plain_loop(make, clip, microbatches)


def fresh() -> Stepper:
    model = plain_model()
    return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")


def gradients_of(stepper: Stepper, loss: Any, batch: Any) -> Tensor:
    """The gradients that the optimizer was given, as one vector."""
    found: list[Tensor] = []
    optimizer = stepper.optimizers["loss"]
    handle = optimizer.register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in stepper.model.parameters())
    )
    assert stepper.step(loss, batch).applied
    handle.remove()
    return torch.cat([g.flatten() for g in found])


def counted(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return halfstep.Counted(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [1, 2, 3, 6], [9, 1, 1, 1]])
def test_micro_batches_with_unequal_counts_equal_one_batch(sizes: list[int]) -> None:
    (x, y) = data(1)[0]
    whole = gradients_of(fresh(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y))
    window = Window(zip(x.split(sizes), y.split(sizes), strict=True))
    assert relative(gradients_of(fresh(), counted, window), whole) < 1e-6

    # Later windows are divided by the first one's count and set right afterwards.
    stepper = fresh()
    stepper.step(counted, (x.repeat(50, 1), y.repeat(50)))
    stepper.model.load_state_dict(plain_model().state_dict())
    assert relative(gradients_of(stepper, counted, window), whole) < 1e-6
    assert stepper.state_dict()["losses"]["loss"]["base_count"] == 600.0


def test_means_of_unequal_micro_batches_do_not_equal_one_batch() -> None:
    """What the (sum, count) form is for; if this ever fails, the test above proves nothing."""
    (x, y) = data(1)[0]
    whole = gradients_of(fresh(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y))
    window = Window(zip(x.split([9, 1, 1, 1]), y.split([9, 1, 1, 1]), strict=True))
    assert relative(gradients_of(fresh(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), window), whole) > 0.05


def test_the_reported_loss_is_the_mean_over_what_was_counted() -> None:
    (x, y) = data(1)[0]
    model = plain_model()
    expected = F.cross_entropy(model(x), y).item()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp32")
    window = Window(zip(x.split([1, 2, 3, 6]), y.split([1, 2, 3, 6]), strict=True))
    assert stepper.step(counted, window).loss == pytest.approx(expected, rel=1e-6)
    assert stepper.step(lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y)).loss == pytest.approx(expected, rel=1e-6)


def test_sums_over_many_elements_do_not_overflow_fp16() -> None:
    def pixels(model: nn.Module, batch: Tensor) -> halfstep.Counted:
        out = model(batch)
        loss = F.binary_cross_entropy_with_logits(out.float(), torch.ones_like(out).float(), reduction="sum")
        return halfstep.Counted(loss, out.numel())

    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16")
    reports = [stepper.step(pixels, torch.randn(65536, 8)) for _ in range(3)]
    assert [r.applied for r in reports] == [True] * 3
    assert reports[-1].loss_scale == 65536.0


def test_nothing_counted_is_no_loss() -> None:
    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    nothing = lambda m, x: halfstep.Counted(m(x).sum() * 0.0, 0)  # noqa: E731
    assert stepper.step(nothing, torch.randn(2, 8)).reason == "loss_not_finite"
    assert stepper.state_dict()["losses"]["loss"]["base_count"] is None
    assert stepper.step(counted, data(1)[0]).applied
    assert stepper.step(nothing, torch.randn(2, 8)).reason == "loss_not_finite"


def test_counts_may_be_tensors() -> None:
    (x, y) = data(1)[0]
    as_tensor = lambda m, b: halfstep.Counted(counted(m, b)[0], torch.tensor(len(b[1])))  # noqa: E731
    assert torch.equal(gradients_of(fresh(), as_tensor, (x, y)), gradients_of(fresh(), counted, (x, y)))


@pytest.mark.wording
def test_mixing_the_two_forms_of_a_loss_in_a_window_is_refused() -> None:
    stepper = Stepper(m := plain_model(), torch.optim.SGD(m.parameters(), 0.1), precision="fp32")
    turns = iter([False, True])
    mixed = lambda m, b: counted(m, b) if next(turns) else counted(m, b)[0]  # noqa: E731
    with pytest.raises(WrongUse, match="the same for every micro-batch"):
        stepper.step(mixed, Window(data(2)))


@pytest.mark.wording
def test_clipping_by_value() -> None:
    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1.0), precision="fp32", clip_value=1e-3)
    gradients = gradients_of(stepper, lambda m, x: m(x).square().sum(), torch.randn(6, 8))
    assert gradients.abs().max().item() == pytest.approx(1e-3)
    with pytest.raises(WrongUse, match="one of them"):
        Stepper(model, torch.optim.SGD(model.parameters(), 1.0), precision="fp32", clip_value=1e-3, clip_norm=1.0)


def test_clipping_sees_unscaled_gradients() -> None:
    """The classic mistake clips at 65536 times too little; here fp16 and fp32 move the same distance."""

    def moved(precision: str) -> float:
        model = plain_model()
        start = model[0].weight.detach().clone()
        scale = DynamicScale(init_scale=1024.0) if precision == "fp16" else None
        stepper = Stepper(
            model, torch.optim.SGD(model.parameters(), 1.0), precision=precision, clip_norm=0.5, loss_scale=scale
        )
        report = stepper.step(lambda m, x: m(x).float().square().sum() * 10, torch.randn(6, 8))
        assert report.grad_norm > 0.5
        return (model[0].weight - start).norm().item()

    assert moved("fp16") == pytest.approx(moved("fp32"), rel=0.02)


def test_windows() -> None:
    assert [list(w) for w in windows(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert list(windows([], 2)) == []
    with pytest.raises(WrongUse):
        list(windows([1], 0))


def test_a_short_last_window_is_divided_by_its_own_length() -> None:
    (x, y) = data(1)[0]
    halves = Window(zip(x.split([6, 6]), y.split([6, 6]), strict=True))
    mean = lambda m, b: F.cross_entropy(m(b[0]), b[1])  # noqa: E731
    assert relative(gradients_of(fresh(), mean, halves), gradients_of(fresh(), mean, (x, y))) < 1e-6
