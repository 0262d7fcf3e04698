"""Images out of noise: an autoencoder, and a denoiser of its latents that can be asked for a class or with an image."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.image import PeakSignalNoiseRatio
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.errors import WrongUse
from halfstep.precision.precision import Precision
from halfstep.tasks import _pixels
from halfstep.tasks._latents.scale import doubts, measured_scale
from halfstep.tasks._latents.source import LatentSource
from halfstep.tasks._sources import pictured
from halfstep.tasks.models.latent.building import latent_diffusion
from halfstep.tasks.models.latent.checks import check
from halfstep.tasks.models.latent.conditions import Condition
from halfstep.tasks.models.latent.denoiser import Asked
from halfstep.tasks.models.latent.encoding_once import encoded_once
from halfstep.tasks.models.latent.losses import divergence, reconstruction, squared_errors
from halfstep.tasks.models.latent.model import LatentDiffusion
from halfstep.tasks.models.latent.noise import Draws
from halfstep.tasks.models.latent.origins import Origins
from halfstep.tasks.models.latent.quarters import DenoisingByNoise
from halfstep.tasks.models.latent.sampling import sampled
from halfstep.tasks.models.latent.wanted import classes_in_turn, first_conditions
from halfstep.tasks.options.diffusion import SCHEMA
from halfstep.train.data.reading import scaled
from halfstep.train.data.source import Sample, Source
from halfstep.train.task import Picture, Prediction, Split, Task, Told, unheard

PARTS = {"class": "label", "image": "condition", "embedding": "embedding"}
"""The part of a sample that each kind of condition is made of."""


class Diffusion(Task):
    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    tiny: ClassVar[Mapping[str, Any]] = {
        "model": {
            "stage": "both",
            "autoencoder_widths": [8, 16],
            "widths": [8, 16],
            "layers": 1,
            "condition": "class",
            "timesteps": 100,
            "sample_steps": 4,
        },
        "data": {"name": "shapes", "size": 16, "samples": 20, "classes": 4, "augment": "flip"},
        "loss": {},
    }

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        check(recipe)
        options, data = recipe.model, recipe.data
        self.kind: str = "none" if options.stage == "autoencoder" else options.condition
        self.pixels, self.conditions = _around_zero(data.channels), _around_zero(data.condition_channels)
        self.origins = Origins(options, data, recipe.run.dir)
        self._view = v2.Compose([v2.Resize(data.size, antialias=True), v2.CenterCrop(data.size)])
        self._classes: list[str] = []
        self._embedding: list[int] = []
        self._sources: dict[Split, LatentSource] = {}

    @property
    def classes(self) -> list[str]:
        """What a sample can be asked for: remembered from training, or read from the data."""
        if self.kind == "class" and not self._classes:
            self._read()
        return self._classes

    @property
    def embedding(self) -> list[int]:
        """Tokens and width of an embedding: remembered from training, or read from the data."""
        if self.kind == "embedding" and not self._embedding:
            first = self._wanted(1, torch.get_default_device())
            self._embedding = [] if first is None else list(first.given.shape[1:])
        return self._embedding

    @property
    def channels_read(self) -> int:
        """Channels of an image that `predict` takes."""
        data = self.recipe.data
        return int(data.condition_channels if self.kind == "image" else data.channels)

    def facts(self) -> dict[str, Any]:
        known = {"classes": self.classes, "embedding": self.embedding}
        return {name: value for name, value in known.items() if value} | self.origins.facts()

    def remember(self, facts: Mapping[str, Any]) -> None:
        self._classes = list(facts.get("classes", self._classes))
        self._embedding = list(facts.get("embedding", self._embedding))
        self.origins.remember(facts)

    def model(self) -> nn.Module:
        data = self.recipe.data
        width = self.embedding[-1] if self.embedding else 0
        asked = Asked(self.kind, len(self.classes), data.condition_channels, width)
        return latent_diffusion(self.recipe.model, data, asked, self.origins)

    def ready(self, model: nn.Module, precision: Precision, told: Told = unheard) -> list[str]:
        """Encode the data once, where the autoencoder stays as it is, and measure the scale of its latents."""
        assert isinstance(model, LatentDiffusion)
        if not model.frozen or model.autoencoder is None:
            return self.origins.notes
        if not self._sources:
            self._read()
        moments, told_of = encoded_once(model, precision, self.recipe, self._sources, self._image, told)
        lines = [*self.origins.notes, *told_of]
        if model.latent_scale > 0.0:
            return lines + doubts(model.latent_scale.item(), moments)
        scale = measured_scale(moments)
        model.latent_scale.fill_(scale)
        return [*lines, f"latents are multiplied by {scale:.4g}, one over their standard deviation"]

    def source(self, split: Split) -> Source:
        if not self._sources:
            self._read()
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        ready: Sample = {name: sample[name] for name in ("moments", "label") if name in sample}
        if "image" in sample:
            ready["image"] = self._image(sample)
        if self.kind == "image":
            ready["condition"] = self._seen(sample["condition"], self.conditions)
        if self.kind == "embedding":
            ready["embedding"] = _tokens(sample["embedding"])
        if split == "train" and self.recipe.data.augment == "flip" and torch.rand(()) < 0.5:
            ready |= {name: ready[name].flip(-1) for name in ("image", "condition") if name in ready}
        return ready

    def loss(self, model: nn.Module, batch: Sample, metrics: MetricCollection | None = None) -> Tensor:
        assert isinstance(model, LatentDiffusion)
        draws = Draws.for_model(model)
        moments, latents = _latents(model, batch, draws)
        losses: list[Tensor] = []
        told: dict[str, Tensor] = {}
        if moments is not None and not model.frozen:
            image, said = batch["image"], model.pixels(latents)
            losses.append(reconstruction(said, image) + self.recipe.loss.kl * divergence(moments, image))
            told |= {"preds": said.detach(), "target": image}
        if model.denoiser is not None:
            # Detached, or the autoencoder would learn to make latents that are easy to denoise and say little.
            errors, timesteps = self._errors(model, latents.detach(), batch, draws)
            losses.append((model.noise.weights(timesteps, self.recipe.loss.min_snr) * errors).mean())
            told |= {"errors": errors.detach(), "at": timesteps}
        if metrics is not None:
            metrics.update(**told)
        return torch.stack(losses).sum()

    def metrics(self) -> MetricCollection:
        options = self.recipe.model
        found: dict[str, Any] = {}
        if options.stage != "denoiser":
            found["psnr"] = PeakSignalNoiseRatio(data_range=(-1.0, 1.0))
        if options.stage != "autoencoder":
            found["denoising"] = DenoisingByNoise(options.timesteps)
        return MetricCollection(found, compute_groups=False)

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """The condition where it is an image, the truth, what the autoencoder makes of it, and a sample."""
        assert isinstance(model, LatentDiffusion)
        moments, latents = _latents(model, batch, None)
        decoded = model.pixels(latents)
        columns = [batch.get("image", decoded)]
        if moments is not None and not model.frozen:
            columns.append(decoded)
        if model.denoiser is not None:
            columns.append(self._samples(model, len(latents), self._condition(batch), Draws.same_each_time()))
        shown = [[self.pixels.shown(image) for image in column] for column in columns]
        if self.kind == "image":
            shown.insert(0, [self.conditions.shown(image) for image in batch["condition"]])
        return [_pixels.side_by_side(row) for row in zip(*shown, strict=True)]

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """What an image condition comes to; or what the autoencoder makes of an image."""
        assert isinstance(model, LatentDiffusion)
        if len(image) != self.channels_read:
            raise WrongUse(
                f"an image of {len(image)} channels",
                allowed=f"{self.channels_read} channels, as the model was trained with",
                do="give images like those of the training data",
            )
        seen = self._seen(image, self.conditions if self.kind == "image" else self.pixels)
        seen = seen.unsqueeze(0).to(model.latent_scale.device)
        if self.kind == "image":
            return self._answered(model, seen)
        if model.autoencoder is None:
            raise WrongUse(
                "a folder of images for a model that makes images, and looks at none",
                allowed="no folder",
                do="halfstep predict RUN, without a folder",
            )
        return self._reconstructed(model, seen)

    def sample(self, model: nn.Module, count: int, told: Told) -> list[Picture]:
        """Classes in turn; or the first conditions of the validation samples: an image stands beside its sample."""
        assert isinstance(model, LatentDiffusion)
        if model.denoiser is None:
            return super().sample(model, count, told)
        condition = self._wanted(count, model.latent_scale.device)
        drawn = self._samples(model, count, condition, Draws(), told)
        pictures = [self.pixels.shown(image) for image in drawn]
        if condition is None or self.kind != "image":
            return pictures
        asked = [self.conditions.shown(image) for image in condition.given]
        return [_pixels.side_by_side(pair) for pair in zip(asked, pictures, strict=True)]

    def _read(self) -> None:
        sources, names = pictured(self.recipe.data, self.kind)
        self._sources = {split: LatentSource(source) for split, source in sources.items()}
        self._classes = self._classes or names

    def _image(self, sample: Sample) -> Tensor:
        return self._seen(sample["image"], self.pixels)

    def _seen(self, image: Tensor, pixels: _pixels.Pixels) -> Tensor:
        # Few operations know 16-bit integers; 8-bit ones are made smaller first, which is cheaper.
        return pixels.normalised(self._view(image if image.dtype == torch.uint8 else scaled(image)))

    def _errors(self, model: LatentDiffusion, latents: Tensor, batch: Sample, draws: Draws) -> tuple[Tensor, Tensor]:
        """How wrong the denoiser is about each sample, and the timesteps at which it was asked."""
        timesteps, noise = draws.timesteps(latents, len(model.noise)), draws.normal(latents)
        condition = self._condition(batch)
        if condition is not None and model.training:
            condition = condition.dropped(self.recipe.model.condition_drop)
        said = model.denoise(model.noise.noisy(latents, noise, timesteps), timesteps, condition)
        return squared_errors(said, model.noise.target(latents, noise, timesteps)), timesteps

    def _condition(self, batch: Sample) -> Condition | None:
        return None if self.kind == "none" else Condition.of(batch[PARTS[self.kind]])

    def _wanted(self, count: int, device: torch.device) -> Condition | None:
        if self.kind == "none":
            return None
        if self.kind == "class":
            return classes_in_turn(len(self.classes), count, device)
        ready = functools.partial(self.transform, "val")
        return first_conditions(self.source("val"), ready, PARTS[self.kind], count, device)

    def _samples(
        self,
        model: LatentDiffusion,
        count: int,
        condition: Condition | None,
        draws: Draws,
        told: Told = unheard,
    ) -> Tensor:
        data = self.recipe.data
        shape = model.latent_shape(count, data.channels, data.size)
        return sampled(model, self.recipe.model, shape, condition, draws, told)

    def _answered(self, model: LatentDiffusion, asked: Tensor) -> Prediction:
        said = self._samples(model, 1, Condition.of(asked), Draws.same_each_time())[0]
        pair = [self.conditions.shown(asked[0]), self.pixels.shown(said)]
        return Prediction(
            values={"mean": (0.5 + 0.5 * said).clamp(0.0, 1.0).mean().item()}, overlay=_pixels.side_by_side(pair)
        )

    def _reconstructed(self, model: LatentDiffusion, image: Tensor) -> Prediction:
        _, latents = _latents(model, {"image": image}, None)
        said = model.pixels(latents).clamp(-1.0, 1.0)
        error = max(reconstruction(said, image).item(), 1e-10)
        pair = [self.pixels.shown(image[0]), self.pixels.shown(said[0])]
        # Between white and black lie 2.
        return Prediction(values={"psnr": 10.0 * math.log10(4.0 / error)}, overlay=_pixels.side_by_side(pair))


def _latents(model: LatentDiffusion, batch: Sample, draws: Draws | None) -> tuple[Tensor | None, Tensor]:
    """Moments and latents of a batch, encoded now or before; their mean where nothing is drawn.

    Without an autoencoder there are no moments, and the pixels are the latents.
    """
    if model.autoencoder is None:
        return None, batch["image"]
    moments = batch["moments"] if "moments" in batch else model.moments(batch["image"])
    return moments, model.latents(moments, torch.zeros_like if draws is None else draws.normal)


def _around_zero(channels: int) -> _pixels.Pixels:
    """From -1 to 1, as diffusers' autoencoders want it."""
    return _pixels.Pixels((0.5,) * channels, (0.5,) * channels)


def _tokens(embedding: Tensor) -> Tensor:
    """Tokens × width; one that is a single vector is one token."""
    return embedding if embedding.ndim == 2 else embedding.unsqueeze(0)
