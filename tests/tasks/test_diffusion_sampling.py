"""Samples: what a perfect denoiser leads to, guidance by hand, whose turn it is, and pictures of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.data.dataset import BadSample, Source
from halfstep.errors import BadData
from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.models.latent.model import Condition, ConditionSpec, LatentDiffusion
from halfstep.tasks.models.latent.noise import Draws, NoiseSchedule
from halfstep.tasks.models.latent.sampling import AT_ONCE, generate_images, read_first_conditions
from tests.tasks.test_diffusion import CPU, MAPS, PIXELS, diffusion, embedded, model_of

SHAPE = (2, 3, 16, 16)


class Answer:
    def __init__(self, sample: Tensor) -> None:
        self.sample = sample


class Oracle(nn.Module):
    """Knows the only image there is; of a class, one that is as bright as the class's number says."""

    def __init__(self, image: Tensor, noise: NoiseSchedule) -> None:
        super().__init__()
        self.image, self.signal, self.prediction = image, noise.signal, noise.prediction
        self.asked_at: list[int] = []

    def forward(self, noisy: Tensor, timesteps: Tensor, class_labels: Tensor | None = None) -> Answer:
        assert timesteps.dtype is torch.int64
        self.asked_at.append(timesteps[0].item())
        image = self.image if class_labels is None else 0.1 * class_labels.view(-1, 1, 1, 1)
        signal = self.signal[timesteps].view(-1, 1, 1, 1)
        noise = (noisy - signal.sqrt() * image) / (1 - signal).sqrt()
        return Answer(noise if self.prediction == "epsilon" else signal.sqrt() * noise - (1 - signal).sqrt() * image)


def oracle(options: Any, asked: ConditionSpec | None = None, image: Tensor | None = None) -> LatentDiffusion:
    noise = NoiseSchedule(options)
    knows = Oracle(torch.zeros(SHAPE) if image is None else image, noise)
    return LatentDiffusion(None, knows, noise, asked or ConditionSpec()).eval()


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_a_perfect_denoiser_leads_to_the_image(sampler: str, prediction: str, steps: int) -> None:
    options = diffusion(**PIXELS, sampler=sampler, prediction=prediction, sample_steps=steps).recipe.model
    image = torch.rand(SHAPE) * 1.8 - 0.9
    got = generate_images(oracle(options, image=image), options, SHAPE, None, Draws())
    torch.testing.assert_close(got, image, atol=2e-2, rtol=0)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_sampling_begins_where_all_is_noise(sampler: str) -> None:
    options = diffusion(**PIXELS, sampler=sampler, sample_steps=4).recipe.model
    model: Any = oracle(options)
    generate_images(model, options, SHAPE, None, Draws())
    assert model.denoiser.asked_at == [99, 74, 49, 24]


@pytest.mark.parametrize(("sampler", "timesteps", "steps"), [("ddim", 1000, 61), ("ddpm", 100, 58)])
def test_no_more_steps_are_taken_than_were_asked_for(sampler: str, timesteps: int, steps: int) -> None:
    options = diffusion(**PIXELS, sampler=sampler, timesteps=timesteps, sample_steps=steps).recipe.model
    model: Any = oracle(options)
    generate_images(model, options, SHAPE, None, Draws())
    assert len(model.denoiser.asked_at) == steps
    assert min(model.denoiser.asked_at) >= 0


class Off(Oracle):
    """Knows the noise as well as a network does, and notes how far its inputs are spread."""

    def __init__(self, image: Tensor, noise: NoiseSchedule) -> None:
        super().__init__(image, noise)
        self.spread: list[float] = []

    def forward(self, noisy: Tensor, timesteps: Tensor, class_labels: Tensor | None = None) -> Answer:
        self.spread.append(noisy.std().item())
        exact = super().forward(noisy, timesteps, class_labels).sample
        return Answer(exact + 0.02 * torch.randn_like(exact))


class AsTheyAre(nn.Module):
    """An autoencoder whose latents are the images."""

    def decode(self, latents: Tensor) -> Answer:
        return Answer(latents)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@pytest.mark.parametrize("noise", ["scaled_linear", "squaredcos_cap_v2"])
def test_a_small_error_about_the_noise_does_not_blow_up_latents(sampler: str, noise: str) -> None:
    options = diffusion(sampler=sampler, noise=noise, timesteps=1000, sample_steps=50).recipe.model
    schedule, image = NoiseSchedule(options), torch.randn(SHAPE)
    knows = Off(image, schedule)
    model = LatentDiffusion(AsTheyAre(), knows, schedule, ConditionSpec()).eval()  # type: ignore[arg-type]
    got = generate_images(model, options, SHAPE, None, Draws())
    assert max(knows.spread) < 1.5, "latents and noise have a spread of one each"
    torch.testing.assert_close(got, image, atol=0.2, rtol=0)


def bright(guidance: float, condition: Condition) -> list[float]:
    """How bright samples of the classes become; the oracle's images are 0.1 times the class, and 0.4 for no class."""
    options = diffusion(**PIXELS, guidance=guidance, sample_steps=10).recipe.model
    model = oracle(options, ConditionSpec("class", classes=4))
    return generate_images(model, options, SHAPE, condition, Draws()).mean((1, 2, 3)).tolist()


@pytest.mark.parametrize(
    ("guidance", "expected"), [(1.0, [0.1, 0.3]), (0.0, [0.4, 0.4]), (2.0, [-0.2, 0.2]), (3.0, [-0.5, 0.1])]
)
def test_guidance_leads_away_from_no_condition(guidance: float, expected: list[float]) -> None:
    asked = Condition.of(torch.tensor([1, 3]))
    assert bright(guidance, asked) == pytest.approx(expected, abs=0.02)


def test_steps_are_told_over_all_batches() -> None:
    options = diffusion(**PIXELS, sample_steps=4).recipe.model
    heard: list[tuple[int, int]] = []
    shape = (AT_ONCE + 1, 3, 2, 2)
    model = oracle(options, image=torch.zeros(1, 3, 2, 2))
    images = generate_images(model, options, shape, None, Draws(), lambda *news: heard.append(news))
    assert images.shape == shape
    assert heard == [(done, 8) for done in range(1, 9)]


def test_samples_are_decided_by_torchs_generator() -> None:
    task = diffusion(sampler="ddpm")
    model = model_of(task).eval()

    def drawn(seed: int) -> list[np.ndarray[Any, Any]]:
        torch.manual_seed(seed)
        return task.sample(model, 3, lambda done, of: None)

    assert np.array_equal(drawn(1), drawn(1))
    assert not np.array_equal(drawn(1), drawn(2))


def test_classes_come_in_turn() -> None:
    task = diffusion(**PIXELS, guidance=1.0, sample_steps=10)
    model = oracle(task.recipe.model, ConditionSpec("class", classes=4))
    shades = [picture.mean() for picture in task.sample(model, 9, lambda done, of: None)]
    expected = [127.5 * (1 + 0.1 * (n % 4)) for n in range(9)]
    assert shades == pytest.approx(expected, abs=3.0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_samples_in_16_bits_are_close_to_those_in_fp32(precision: str) -> None:
    task = diffusion(**PIXELS, condition="none", sample_steps=4)
    model = model_of(task).eval()
    pictures = []
    for name in ("fp32", precision):
        with resolve_precision_name(name).inference(CPU):
            pictures.append(task._samples(model, 2, None, Draws.same_each_time()))
    assert pictures[1].dtype is torch.float32
    assert (pictures[0] - pictures[1]).abs().mean() < 0.05


@pytest.mark.parametrize(("stage", "columns"), [("autoencoder", 2), ("both", 3)])
@torch.no_grad()
def test_pictures_have_a_column_for_each_thing(stage: str, columns: int) -> None:
    task = diffusion(stage=stage)
    model = model_of(task).eval()
    batch = {name: tensor[None] for name, tensor in task.transform("val", task.source("val").read(0)).items()}
    (picture,) = task.pictures(model, batch)
    assert picture.shape == (16, 16 * columns + 4 * (columns - 1), 3)
    assert np.array_equal(picture, task.pictures(model, batch)[0])


@torch.no_grad()
def test_an_image_condition_is_drawn_beside_what_it_came_to() -> None:
    task = diffusion(MAPS, **PIXELS, condition="image")
    model = model_of(task).eval()
    first = task.source("val").read(0)
    shown = first["condition"][0].numpy()
    pictures = task.sample(model, 2, lambda done, of: None)
    assert [picture.shape for picture in pictures] == [(16, 36, 3)] * 2
    assert np.array_equal(pictures[0][:, :16, 0], shown)
    batch = {name: tensor[None] for name, tensor in task.transform("val", first).items()}
    (row,) = task.pictures(model, batch)
    assert row.shape == (16, 56, 3)
    assert np.array_equal(row[:, :16, 0], shown)
    assert np.array_equal(row[:, 20:36, 0], first["image"][0].numpy())
    said = task.predict(model, first["condition"])
    assert said.overlay is not None
    assert np.array_equal(said.overlay[:, :16, 0], shown)
    assert 0.0 <= float(str(said.values["mean"])) <= 1.0
    assert task.predict(model, first["condition"]).values == said.values


def test_embeddings_of_the_first_validation_samples_are_taken(tmp_path: Path) -> None:
    task = diffusion(embedded(tmp_path, (2, 6)), condition="embedding")
    found = task._wanted(5, CPU)
    assert found is not None
    source = task.source("val")
    expected = [source.read(n % len(source))["embedding"] for n in range(5)]
    assert torch.equal(found.given, torch.stack(expected))
    assert len(task.sample(model_of(task).eval(), 2, lambda done, of: None)) == 2


class Damaged(Source):
    """Every sample but those given cannot be read."""

    def __init__(self, good: list[int]) -> None:
        self.good = good

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> dict[str, Tensor]:
        if index not in self.good:
            raise BadSample(self.name(index), "damaged")
        return {"condition": torch.full((1,), float(index))}

    def name(self, index: int) -> str:
        return str(index)


@pytest.mark.wording
def test_samples_that_cannot_be_read_are_passed_over() -> None:
    found = read_first_conditions(Damaged([1, 3]), lambda sample: sample, "condition", 5, CPU)
    assert found.given.flatten().tolist() == [1, 3, 1, 3, 1]
    with pytest.raises(BadData, match="no validation sample"):
        read_first_conditions(Damaged([]), lambda sample: sample, "condition", 5, CPU)


def test_an_autoencoder_makes_nothing_by_itself() -> None:
    task = diffusion(stage="autoencoder")
    with pytest.raises(NotImplementedError):
        task.sample(model_of(task).eval(), 2, lambda done, of: None)
