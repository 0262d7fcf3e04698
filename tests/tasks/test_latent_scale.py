"""The scale of latents: the standard deviation that was measured becomes 1, and nonsense is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from halfstep.data.dataset import Sample
from halfstep.errors import BadData
from halfstep.tasks.latent_cache.cache import load_or_encode_latents
from halfstep.tasks.latent_cache.encoding import MomentEncoder, measure_latent_scale, select_spaced_numbers
from tests.support.ranks import Ranks
from tests.tasks.latents_made import PARTS, Pictures, drawn, encoding, scale_on


def moments(mean: Tensor, variance: float) -> Tensor:
    return torch.cat([mean, torch.full_like(mean, math.log(variance))])


def test_it_is_one_over_the_deviation_of_what_is_drawn() -> None:
    means = 3.0 * torch.randn(64, 4, 8, 8)
    given = [moments(mean, 4.0) for mean in means]
    exact = 1.0 / math.sqrt(means.numpy().astype(np.float64).var() + 4.0)
    assert measure_latent_scale(given) == pytest.approx(exact, rel=1e-9)
    samples = means + 2.0 * torch.randn(means.shape)
    assert float((samples * measure_latent_scale(given)).std()) == pytest.approx(1.0, abs=0.02)


def test_batches_and_single_samples_give_the_same() -> None:
    batch = torch.randn(6, 8, 4, 4)
    assert measure_latent_scale([batch]) == pytest.approx(measure_latent_scale(iter(batch)), rel=1e-12)


def test_a_small_deviation_around_a_large_mean_is_not_lost() -> None:
    means = 1000.0 + 0.01 * torch.randn(64, 2, 8, 8, dtype=torch.float64)
    found = measure_latent_scale([moments(mean, 1e-12) for mean in means])
    assert found == pytest.approx(1.0 / float(means.std(correction=0)), rel=1e-3)


@pytest.mark.wording
@pytest.mark.parametrize(
    "given",
    [
        [],
        [torch.full((2, 4, 4), torch.nan)],
        [torch.full((2, 4, 4), torch.inf)],
        [torch.randn(2, 4, 4), torch.cat([torch.full((1, 4, 4), -torch.inf), torch.zeros(1, 4, 4)])],
    ],
)
def test_nothing_and_what_is_not_finite_are_refused(given: list[Tensor]) -> None:
    with pytest.raises(BadData, match="standard deviation") as caught:
        measure_latent_scale(given)
    assert caught.value.do


@pytest.mark.wording
def test_latents_that_are_all_alike_are_refused() -> None:
    """What is drawn around them varies a little always, as diffusers holds it: not enough to be multiplied up to 1."""
    with pytest.raises(BadData, match="standard deviation of 16 latent values"):
        measure_latent_scale([torch.cat([torch.zeros(1, 4, 4), torch.full((1, 4, 4), -900.0)])])


def test_samples_come_from_everywhere() -> None:
    assert select_spaced_numbers(10, 4) == [0, 2, 5, 7]
    assert select_spaced_numbers(3, 10) == [0, 1, 2]
    assert select_spaced_numbers(0, 10) == []
    source = Pictures(1000)
    everything = measure_latent_scale(load_or_encode_latents(encoding(), source, parts=PARTS).spread())
    assert measure_latent_scale(encoding().spread(source, 50)) == pytest.approx(everything, rel=0.05)
    first = measure_latent_scale([encoding().moments(source.read(n)["image"][None])[0] for n in range(50)])
    assert first > 1.5 * everything, "the first ones are all alike"


def test_unreadable_samples_do_not_count() -> None:
    whole = measure_latent_scale(load_or_encode_latents(encoding(), Pictures(300), parts=PARTS).spread())
    some = Pictures(300, unreadable=(5, 250))
    assert measure_latent_scale(load_or_encode_latents(encoding(), some, parts=PARTS).spread()) == pytest.approx(
        whole, rel=0.02
    )
    assert measure_latent_scale(encoding().spread(some)) == pytest.approx(whole, rel=0.02)


class Colors(Pictures):
    def read(self, index: int) -> Sample:
        return {"image": torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))}


def test_a_real_autoencoders_latents_have_deviation_one() -> None:
    widths: dict[str, Any] = {"block_out_channels": [8], "norm_num_groups": 4, "latent_channels": 2}
    module = AutoencoderKL(**widths).eval()
    how = MomentEncoder(lambda images: module.encode(images).latent_dist.parameters, _image, torch.empty(0).device)
    latents = load_or_encode_latents(how, Colors(64), parts=PARTS)
    scale = measure_latent_scale(latents.spread())
    images = torch.stack([Colors(64).read(n)["image"] for n in range(64)])
    with torch.no_grad():
        samples = module.encode(images).latent_dist.sample() * scale
    assert float(samples.std()) == pytest.approx(1.0, abs=0.02)
    assert scale != pytest.approx(0.18215, rel=0.1)


def _image(sample: Sample) -> Tensor:
    return sample["image"]


@pytest.mark.ranks
@pytest.mark.parametrize("numbers", [[5, 3], [8, 0]])
def test_processes_with_unequal_shares_come_to_one_number(on_ranks: Ranks, numbers: list[int]) -> None:
    one, other = on_ranks(scale_on, numbers)
    assert one == other
    assert one == pytest.approx(measure_latent_scale([drawn(number) for number in range(8)]), rel=1e-12)


@pytest.mark.wording
@pytest.mark.ranks
def test_processes_without_latents_end_together(on_ranks: Ranks) -> None:
    assert all("standard deviation of 0 latent values" in str(said) for said in on_ranks(scale_on, [0, 0]))
