"""Noise: formulas against numbers in float64 and against diffusers, draws that repeat, and errors by quarter."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler

from halfstep.tasks.models.latent.noise import DenoisingByNoise, Draws, NoiseSchedule, build_schedule_settings


def schedule(**changes: Any) -> NoiseSchedule:
    given = {"timesteps": 1000, "noise": "linear", "prediction": "epsilon", **changes}
    return NoiseSchedule(SimpleNamespace(**given))


def signal_by_hand(timestep: int) -> float:
    """The linear schedule: the product of 1 - beta, up to and with the timestep."""
    return math.prod(1.0 - (1e-4 + (0.02 - 1e-4) * t / 999) for t in range(timestep + 1))


@pytest.mark.parametrize("timestep", [0, 250, 999])
def test_noisy_latents_and_targets_are_what_they_are_by_hand(timestep: int) -> None:
    latents, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    at = torch.tensor([timestep, timestep])
    signal = signal_by_hand(timestep)
    x, e = latents.double(), noise.double()
    mixed = math.sqrt(signal) * x + math.sqrt(1 - signal) * e
    torch.testing.assert_close(schedule().noisy(latents, noise, at).double(), mixed, rtol=1e-4, atol=1e-4)
    assert torch.equal(schedule().target(latents, noise, at), noise)
    velocity = math.sqrt(signal) * e - math.sqrt(1 - signal) * x
    got = schedule(prediction="v").target(latents, noise, at)
    torch.testing.assert_close(got.double(), velocity, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_each_sample_has_its_own_timestep_as_in_diffusers(noise: str) -> None:
    options = SimpleNamespace(timesteps=100, noise=noise, prediction="v")
    theirs, ours = DDPMScheduler(**build_schedule_settings(options)), NoiseSchedule(options)
    x, e, at = torch.randn(5, 2, 3, 3), torch.randn(5, 2, 3, 3), torch.tensor([0, 7, 50, 98, 99])
    torch.testing.assert_close(ours.noisy(x, e, at), theirs.add_noise(x, e, at))
    torch.testing.assert_close(ours.target(x, e, at), theirs.get_velocity(x, e, at))


@pytest.mark.parametrize("noise", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("timesteps", [2, 20, 100, 200, 1000, 10_000])
def test_hardly_anything_but_noise_is_left_however_many_steps_lead_there(noise: str, timesteps: int) -> None:
    signal = schedule(noise=noise, timesteps=timesteps).signal
    assert signal[0] > 0.4
    assert (signal.diff() < 0.0).all()
    assert 0.0 < signal[-1].item() < 0.01  # samples begin with noise alone


@pytest.mark.parametrize("noise", ["linear", "scaled_linear"])
def test_a_thousand_steps_are_those_of_diffusers(noise: str) -> None:
    assert torch.equal(schedule(noise=noise).signal, DDPMScheduler(beta_schedule=noise).alphas_cumprod)


def test_min_snr_weights_are_what_they_are_by_hand() -> None:
    at = torch.tensor([0, 100, 500, 999])
    for t, epsilon, v in zip(
        at.tolist(),
        schedule().weights(at, 5.0).tolist(),
        schedule(prediction="v").weights(at, 5.0).tolist(),
        strict=True,
    ):
        snr = signal_by_hand(t) / (1 - signal_by_hand(t))
        assert epsilon == pytest.approx(min(snr, 5.0) / snr, rel=1e-3)
        assert v == pytest.approx(min(snr, 5.0) / (snr + 1), rel=1e-3)
    assert schedule().weights(at, None).tolist() == [1.0] * 4


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_weights_are_finite_where_no_signal_is_left(prediction: str) -> None:
    made = schedule(prediction=prediction)
    made.signal[-1] = 0.0
    weight = made.weights(torch.tensor([999]), 5.0)
    assert weight.tolist() == [1.0 if prediction == "epsilon" else 0.0]


def test_everything_is_fp32_in_a_run_of_16_bits() -> None:
    latents, at = torch.randn(2, 1, 2, 2).bfloat16(), torch.tensor([0, 999])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = [
            schedule(prediction="v").noisy(latents, latents, at),
            schedule(prediction="v").target(latents, latents, at),
            schedule().weights(at, 5.0),
        ]
    assert {tensor.dtype for tensor in made} == {torch.float32}


def test_the_table_moves_with_the_model_and_is_not_saved() -> None:
    assert list(schedule().state_dict()) == []
    assert dict(schedule().named_buffers())["signal"].shape == (1000,)


def test_timesteps_are_integers_and_spread_evenly_where_they_are_the_same_each_time() -> None:
    like = torch.zeros(8, 1)
    even = Draws.same_each_time().timesteps(like, 1000)
    assert even.dtype is torch.int64
    assert even.tolist() == [62, 187, 312, 437, 562, 687, 812, 937]
    assert Draws.same_each_time().timesteps(torch.zeros(1, 1), 1000).tolist() == [500]
    drawn = Draws().timesteps(torch.zeros(2000, 1), 10)
    assert drawn.dtype is torch.int64
    assert set(drawn.tolist()) == set(range(10))


def test_draws_of_evaluation_repeat_and_leave_torchs_generator_alone() -> None:
    like = torch.zeros(2, 3)
    torch.manual_seed(0)
    first = Draws.same_each_time().normal(like)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(Draws.same_each_time().normal(like), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(Draws().normal(like), first)


def test_errors_by_quarter_add_up_over_batches() -> None:
    metric = DenoisingByNoise(100)
    metric.update(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 24, 99]))
    metric.update(torch.tensor([8.0]), torch.tensor([10]))
    values = {name: value.item() for name, value in metric.compute().items()}
    assert values == {"denoising_0": 4.0, "denoising_3": 5.0}
