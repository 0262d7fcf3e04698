"""A loss far above the usual is refused; noise, falling curves and slow rises are not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.guard.alarms.spike import BEGIN, REFUSED, Spike
from halfstep.step.report import Part, StepReport
from tests.support.digest import digest_of_run
from tests.support.models import plain_model


def report(loss: float, **more: float) -> StepReport:
    parts = {"loss": Part(loss, 1.0, 1.0), **{name: Part(value, 1.0, 1.0) for name, value in more.items()}}
    return StepReport(1, 1, True, None, True, loss, 1.0, 1.0, parts)


def noise(seed: int, level: float = 1.0) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield level * draw.lognormvariate(0.0, 0.5)


# -- real training, which has no spikes ------------------------------------------------------------------------------


def regression() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model, true = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 4)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 8)
        return F.mse_loss(model(x), torch.sin(x @ true) + 0.5 * torch.randn(4, 4))

    return model, loss


def classes(apart: float, batch: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model, centres = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)), apart * torch.randn(10, 16)

    def loss(model: nn.Module) -> Tensor:
        y = torch.randint(0, 10, (batch,))
        return F.cross_entropy(model(centres[y] + 1.5 * torch.randn(batch, 16)), y)

    return model, loss


def learnt_to_nothing() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model, true = nn.Linear(8, 1), torch.randn(8, 1)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 8)
        return F.mse_loss(model(x), x @ true)

    return model, loss


def likelihood() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Whose loss becomes negative."""
    model, true = nn.Linear(8, 2), torch.randn(8)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 8)
        mean, log_variance = model(x).unbind(1)
        return F.gaussian_nll_loss(mean, x @ true + 0.1 * torch.randn(8), log_variance.exp())

    return model, loss


def rare() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """One sample in fifty is of another class: most batches have none, and a small loss."""
    model, true = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(16)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 16)
        return F.binary_cross_entropy_with_logits(model(x), (x @ true > 8.0).float()[:, None])

    return model, loss


KINDS: list[Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = [
    regression,
    lambda: classes(1.0, 4),
    lambda: classes(3.0, 4),
    learnt_to_nothing,
    likelihood,
    rare,
]


def losses_of(seed: int, steps: int = 1000) -> list[float]:
    torch.manual_seed(seed)
    model, loss_of = KINDS[seed % len(KINDS)]()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    seen = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_twelve_thousand_clean_steps_have_at_most_one_false_alarm() -> None:
    refused = 0
    for seed in range(12):
        spike = Spike()
        refused += sum(not spike.passes(report(loss)) for loss in losses_of(seed))
    assert refused <= 1


# -- spikes ----------------------------------------------------------------------------------------------------------


def test_twenty_spikes_of_a_real_run_are_refused_and_change_nothing() -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    model, true = plain_model(), torch.randn(8, 4)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision="bf16", guards=[Spike()])
    at = {step: 10.0 ** draw.uniform(2, 6) for step in draw.sample(range(40, 400), 20)}
    caught = []
    for step in range(400):
        x, factor = torch.randn(4, 8), at.get(step, 1.0)
        before = digest_of_run(stepper)

        def loss_fn(model: nn.Module, x: Tensor, factor: float = factor) -> Tensor:
            return factor * F.mse_loss(model(x).float(), x @ true)

        if stepper.step(loss_fn, x).reason == REFUSED:
            caught.append(step)
            assert digest_of_run(stepper) == before
    assert caught == sorted(at)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("how_many", [1, 5])
def test_what_is_not_finite_never_gets_into_the_window(poison: float, how_many: int) -> None:
    """The step asks no guard about a loss that is not finite, so the next spike is judged as before."""
    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp32", guards=[Spike()])
    x = torch.randn(4, 8)
    factors = [1.0] * 30 + [poison] * how_many + [100.0, 1.0]
    reasons = [stepper.step(lambda m, x, f=factor: f * m(x).square().mean(), x).reason for factor in factors]
    assert reasons[-2:] == [REFUSED, None]
    assert reasons[30:-2] == ["loss_not_finite"] * how_many


def test_refused_spikes_do_not_raise_the_limit() -> None:
    spike, usual = Spike(), noise(1)
    for _ in range(60):
        assert spike.passes(report(next(usual)))
    for _ in range(500):
        assert not spike.passes(report(100.0))


def test_decisions_are_the_same_after_saving_at_any_point() -> None:
    draw, usual = random.Random(3), noise(2)
    # Some are refused, some are tall and accepted, and some are accepted only because taller ones came before.
    heights = draw.choices([1.0, 7.0, 20.0, 1000.0], [94, 2, 2, 2], k=1000)
    stream = [next(usual) * height for height in heights]
    whole = Spike()
    expected = [whole.passes(report(loss)) for loss in stream]
    assert not all(expected)
    for at in draw.sample(range(1, 1000), 50):
        first, second = Spike(), Spike()
        decisions = [first.passes(report(loss)) for loss in stream[:at]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        decisions += [second.passes(report(loss)) for loss in stream[at:]]
        assert decisions == expected


# -- a new level -----------------------------------------------------------------------------------------------------


def levels(*losses: float) -> list[bool]:
    """What comes of these, after a run that began with losses of 1 and has come down to 0.001."""
    spike = Spike()
    for loss in [1.0] * 30 + [0.001] * 1000:
        spike.passes(report(loss))
    decisions = [spike.passes(report(loss)) for loss in losses]
    other = Spike()
    other.load_state_dict(json.loads(json.dumps(spike.state_dict())))
    assert other.passes(report(3.0)) == spike.passes(report(3.0))
    return decisions


def test_a_level_is_accepted_after_four_and_is_the_usual_then() -> None:
    assert levels(*[2.0] * 40) == [False] * 4 + [True] * 36
    assert levels(2.0, 3.0, 1.5, 4.0, 2.0, 2.0) == [False] * 4 + [True] * 2
    assert levels(*[2.0] * 30, 100.0) == [False] * 4 + [True] * 26 + [False]


@pytest.mark.parametrize(
    "losses",
    [
        [11.0] * 20,  # beyond what the run began with
        [1.0, 2.0, 4.0, 8.0] * 5,  # not close together
        [1.0, 1.3, 1.8, 2.4, 3.2, 4.4, 6.0, 8.0, 10.5],  # growing
        [2.0, 2.0, 2.0, 0.001] * 5,  # the usual in between
    ],
)
def test_what_is_no_level_is_refused_each_time(losses: list[float]) -> None:
    assert levels(*losses) == [loss < 0.01 for loss in losses]


def test_losses_of_nothing_are_no_measure_for_what_comes_after() -> None:
    spike, usual = Spike(), noise(5)
    for _ in range(60):
        assert spike.passes(report(0.0))
    assert all(spike.passes(report(next(usual))) for _ in range(100))
    assert not spike.passes(report(1000.0))
    # Zero most of the time, and something once in a while, as a hinge loss.
    rare, draw = Spike(), noise(6)
    assert all(rare.passes(report(next(draw) if step % 97 == 0 else 0.0)) for step in range(5000))


# -- what is not a spike ---------------------------------------------------------------------------------------------


def test_nothing_is_refused_before_there_is_a_usual() -> None:
    spike = Spike()
    assert all(spike.passes(report(10.0**step)) for step in range(BEGIN))


def test_a_slow_rise_is_followed() -> None:
    spike, usual = Spike(), noise(4)
    assert all(spike.passes(report(next(usual) * 1.01**step)) for step in range(1000))


def test_losses_of_nothing_and_constants_are_fine() -> None:
    for constant in (0.0, -5.0, 3.0):
        spike = Spike()
        assert all(spike.passes(report(constant)) for _ in range(200))


def test_two_optimizers_are_judged_apart() -> None:
    spike = Spike()
    for _ in range(40):
        assert spike.passes(report(1.0, critic=1000.0))
    assert spike.passes(report(2.0, critic=2000.0))
    assert not spike.passes(report(1000.0, critic=1000.0))
    assert "1,000 times the median" in spike.words(report(1000.0, critic=1000.0))
    assert "of loss" in spike.words(report(1000.0, critic=1000.0))
