"""A loss far above the usual is refused; noise, falling curves and slow rises are not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.errors import StateMismatch
from halfstep.guard.alarms.spike import REFUSED, SpikeGuard
from halfstep.guard.alarms.usual_loss import BEGIN
from halfstep.step.report import OptimizerReport, StepReport
from tests.support.digest import digest_of_run
from tests.support.models import plain_model


def report(loss: float, attempt: int = 1, **more: float) -> StepReport:
    parts = {
        "loss": OptimizerReport(loss, 1.0, 1.0),
        **{name: OptimizerReport(value, 1.0, 1.0) for name, value in more.items()},
    }
    return StepReport(attempt, attempt, True, None, True, loss, 1.0, 1.0, parts)


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


@pytest.mark.full
def test_twelve_thousand_clean_steps_have_at_most_one_false_alarm() -> None:
    refused = 0
    for seed in range(12):
        spike = SpikeGuard()
        refused += sum(not spike.passes(report(loss)) for loss in losses_of(seed))
    assert refused <= 1


# -- spikes ----------------------------------------------------------------------------------------------------------


def test_twenty_spikes_of_a_real_run_are_refused_and_change_nothing() -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    model, true = plain_model(), torch.randn(8, 4)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision="bf16", guards=[SpikeGuard()])
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
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp32", guards=[SpikeGuard()])
    x = torch.randn(4, 8)
    factors = [1.0] * 30 + [poison] * how_many + [100.0, 1.0]
    reasons = [stepper.step(lambda m, x, f=factor: f * m(x).square().mean(), x).reason for factor in factors]
    assert reasons[-2:] == [REFUSED, None]
    assert reasons[30:-2] == ["loss_not_finite"] * how_many


def test_refused_spikes_do_not_raise_the_limit() -> None:
    spike, usual = SpikeGuard(), noise(1)
    for attempt in range(60):
        assert spike.passes(report(next(usual), attempt=attempt))
    for attempt in range(60, 1000):
        loss = 100.0 if attempt % 8 == 0 else next(usual)
        assert spike.passes(report(loss, attempt=attempt)) == (loss != 100.0)


def test_a_quarter_of_all_losses_is_no_accident_and_is_learnt() -> None:
    spike, usual = SpikeGuard(), noise(1)
    for attempt in range(60):
        spike.passes(report(next(usual), attempt=attempt))
    losses = [100.0 if attempt % 3 == 0 else next(usual) for attempt in range(60, 260)]
    decisions = [spike.passes(report(loss, attempt=attempt)) for attempt, loss in enumerate(losses, start=60)]
    assert decisions.count(False) == 8
    assert all(decisions[-150:])


def test_decisions_are_the_same_after_saving_at_any_point() -> None:
    draw, usual = random.Random(3), noise(2)
    # Some are refused, some are tall and accepted, and some are accepted only because taller ones came before.
    heights = draw.choices([1.0, 7.0, 20.0, 1000.0], [94, 2, 2, 2], k=1000)
    stream = [next(usual) * height for height in heights]
    whole = SpikeGuard()
    expected = [whole.passes(report(loss, n)) for n, loss in enumerate(stream)]
    assert not all(expected)
    for at in draw.sample(range(1, 1000), 50):
        first, second = SpikeGuard(), SpikeGuard()
        decisions = [first.passes(report(loss, n)) for n, loss in enumerate(stream[:at])]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        decisions += [second.passes(report(loss, n)) for n, loss in enumerate(stream[at:], start=at)]
        assert decisions == expected


# -- a new level -----------------------------------------------------------------------------------------------------


def levels(*losses: float) -> list[bool]:
    """What comes of these, after a run that began with losses of 1 and has come down to 0.001."""
    spike = SpikeGuard()
    for attempt, loss in enumerate([1.0] * 30 + [0.001] * 1000):
        spike.passes(report(loss, attempt))
    decisions = [spike.passes(report(loss, attempt)) for attempt, loss in enumerate(losses, start=1030)]
    other = SpikeGuard()
    other.load_state_dict(json.loads(json.dumps(spike.state_dict())))
    assert other.passes(report(30.0, 2000)) == spike.passes(report(30.0, 2000))
    return decisions


def test_a_level_is_accepted_after_four_and_is_the_usual_then() -> None:
    assert levels(*[5.0] * 40) == [False] * 4 + [True] * 36
    assert levels(5.0, 7.0, 4.0, 8.0, 5.0, 5.0) == [False] * 4 + [True] * 2
    assert levels(*[5.0] * 30, 200.0) == [False] * 4 + [True] * 26 + [False]
    assert levels(4.0, 5.0, 6.0, 7.0, *[8.0] * 6) == [False] * 7 + [True] * 3  # waits while it rises


@pytest.mark.parametrize("losses", [[11.0] * 9, [20.0, 50.0, 30.0, 90.0] * 2, [11.0 * 3.0**n for n in range(9)]])
def test_what_is_beyond_all_losses_of_the_run_and_stays_is_ruin(losses: list[float]) -> None:
    spike = SpikeGuard()
    for loss in [1.0] * 30 + [0.001] * 1000:
        spike.passes(report(loss))
    seen = []
    for loss in losses:
        assert not spike.passes(report(loss))
        seen.append(spike.diverges)
    assert seen == [False] * 3 + [True] * (len(losses) - 3)


@pytest.mark.parametrize("factor", [0.3, 0.7, 0.95])
def test_losses_that_fall_are_waited_for_and_never_called_ruin(factor: float) -> None:
    spike = SpikeGuard(refuses=False)
    for _ in range(100):
        spike.passes(report(1.0))
    for n in range(40):
        assert spike.passes(report(1 + 1e7 * factor**n))
        assert not spike.diverges


def kinds(losses: list[float], **more: Any) -> list[str]:
    """What a guard that refuses nothing says about these."""
    spike, said = SpikeGuard(refuses=False), list[str]()
    for attempt, loss in enumerate(losses):
        assert spike.passes(report(loss, attempt, **more))
        said += [notice.kind for notice in spike.notices]
    return said


def quiet(level: float = 1.0, steps: int = 100) -> list[float]:
    usual = noise(8, level)
    return [next(usual) for _ in range(steps)]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (quiet() + quiet(40.0), ["new level"]),
        (quiet() + quiet(40.0) + quiet(), ["new level"]),
        ([*quiet(), 1e5, *quiet()], ["spike"]),
        (quiet() + [1e5] * 3 + quiet(), ["spike"]),
        (quiet() + [1e5, *quiet(steps=20)] * 10, ["spike"]),  # a rare batch that comes again and again
        (quiet() + [10.0**n for n in range(3, 15)], ["divergence"]),
        (quiet() + quiet(1e6, 30), ["divergence", "new level"]),
        (quiet() + [1.04**n for n in range(600)], ["risen"]),
        ([1e4 * 0.95**n for n in range(600)], []),
        (quiet(1e-12) + quiet(2e-12), []),
        (quiet(1e-300) + quiet(1e-300), []),
        (quiet(1e300), []),
        ([0.0] * 200, []),
        ([math.nextafter(0.0, 1.0)] * 60 + [1e308] * 2, []),
        ([], []),
    ],
)
def test_each_thing_is_called_by_its_name_and_told_once(losses: list[float], said: list[str]) -> None:
    assert kinds(losses) == said


@pytest.mark.parametrize("middle", [-50.0, -1.0, 0.0, 1.0])
@pytest.mark.parametrize("wide", [0.1, 3.0])
def test_losses_about_and_below_zero_have_a_scale_of_their_own(middle: float, wide: float) -> None:
    """As those of a critic or a likelihood, which have no logarithm."""
    draw = random.Random(5)
    usual = [draw.gauss(middle, wide) for _ in range(1000)]
    assert kinds(usual) == []
    scale = max(abs(middle), wide)
    assert kinds([*usual, 1e4 * scale, *usual]) == ["spike"]
    assert kinds([*usual, *(loss + 200.0 * scale for loss in usual)]) == ["new level"]
    spike = SpikeGuard()
    assert all(spike.passes(report(loss)) for loss in usual)
    assert not spike.passes(report(100.0 * scale))
    assert spike.passes(report(middle - 1000.0 * scale))  # far below is good news


def test_a_likelihood_that_falls_through_zero_is_fine() -> None:
    draw = random.Random(6)
    assert kinds([5.0 - step / 50 + draw.gauss(0.0, 0.3) for step in range(1000)]) == []


def test_losses_over_decades_are_noise_and_are_learnt() -> None:
    draw = random.Random(9)
    assert kinds([10.0 ** draw.uniform(-3.0, 1.0) for _ in range(2000)]) == []


def test_a_spike_that_is_not_much_above_the_noise_is_for_information() -> None:
    spike = SpikeGuard(refuses=False)
    for loss in [*quiet(), 40.0, 1.0, *quiet(), 1e5, 1.0]:
        spike.passes(report(loss))
        for notice in spike.notices:
            assert notice.loud == ("1e+05" in notice.text)


@pytest.mark.wording
def test_an_old_state_is_refused_by_name_and_nothing_is_loaded() -> None:
    spike = SpikeGuard()
    spike.passes(report(1.0))
    before = spike.state_dict()
    for old in ({"losses": [1.0], "tallest": 1.0, "first": 1.0, "beginning": [], "refused": []}, {}):
        with pytest.raises(StateMismatch, match="spike guard's state"):
            spike.load_state_dict({"loss": old})
    broken = json.loads(json.dumps(before))
    del broken["loss"]["usual"]["highest_median"]
    with pytest.raises(StateMismatch, match="another version"):
        spike.load_state_dict(broken)
    assert spike.state_dict() == before


def test_losses_of_nothing_are_no_measure_for_what_comes_after() -> None:
    spike, usual = SpikeGuard(), noise(5)
    for _ in range(60):
        assert spike.passes(report(0.0))
    assert all(spike.passes(report(next(usual))) for _ in range(100))
    assert not spike.passes(report(1000.0))
    # Zero most of the time, and something once in a while, as a hinge loss.
    rare, draw = SpikeGuard(), noise(6)
    assert all(rare.passes(report(next(draw) if step % 97 == 0 else 0.0)) for step in range(5000))


# -- what is not a spike ---------------------------------------------------------------------------------------------


def test_nothing_is_refused_before_there_is_a_usual() -> None:
    spike = SpikeGuard()
    assert all(spike.passes(report(10.0**step)) for step in range(BEGIN))


def test_a_slow_rise_is_followed() -> None:
    spike, usual = SpikeGuard(), noise(4)
    assert all(spike.passes(report(next(usual) * 1.01**step)) for step in range(1000))


def test_losses_of_nothing_and_constants_are_fine() -> None:
    for constant in (0.0, -5.0, 3.0):
        spike = SpikeGuard()
        assert all(spike.passes(report(constant)) for _ in range(200))


def test_two_optimizers_are_judged_apart() -> None:
    spike = SpikeGuard()
    for _ in range(40):
        assert spike.passes(report(1.0, critic=1000.0))
    assert spike.passes(report(2.0, critic=2000.0))
    assert not spike.passes(report(1000.0, critic=1000.0))
    assert "1,000 times the median" in spike.words(report(1000.0, critic=1000.0))
    assert "of loss" in spike.words(report(1000.0, critic=1000.0))
