"""Latent diffusion: train an autoencoder, and a denoiser of its latents with an optional class, image or embedding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.data.dataset import Sample, Source
from halfstep.data.image_io import scale_to_unit_range
from halfstep.errors import WrongUse
from halfstep.precision.island import find_islands
from halfstep.precision.precision import Precision
from halfstep.status_line import OnProgress
from halfstep.tasks.latent_cache.cache import LatentSource, load_or_encode_latents
from halfstep.tasks.latent_cache.encoding import MomentEncoder, describe_scale_misfit, measure_latent_scale
from halfstep.tasks.models.latent.model import Condition, ConditionSpec, LatentDiffusion
from halfstep.tasks.models.latent.noise import (
    DenoisingByNoise,
    Draws,
    compute_kl_divergence,
    compute_reconstruction_loss,
    compute_squared_errors,
)
from halfstep.tasks.models.latent.pretrained import PartBuilder, build_latent_diffusion
from halfstep.tasks.models.latent.sampling import build_class_conditions, generate_images, read_first_conditions
from halfstep.tasks.options.diffusion import SCHEMA, check
from halfstep.tasks.shared import images
from halfstep.tasks.shared.sources import build_diffusion_sources
from halfstep.train.metrics import Metric, Metrics, PeakSignalNoiseRatio
from halfstep.train.task import Picture, Prediction, Split, Task, ignore_progress
from halfstep.train.weights import compute_weights_digest


def cache_latents_if_possible(
    model: LatentDiffusion,
    precision: Precision,
    recipe: Any,
    sources: Mapping[Split, LatentSource],
    image_of: Callable[[Sample], Tensor],
    on_progress: OnProgress,
) -> tuple[Iterable[Tensor], list[str]]:
    """Return moments to measure the latent scale from, and lines to report.

    Where latents can be cached, `sources` are switched to read moments from the cache instead of images.
    """
    assert model.autoencoder is not None
    data = recipe.data
    device = next(model.parameters()).device
    encoding = MomentEncoder(functools.partial(_compute_moments, model, precision, device), image_of, device)
    # A flip of the image is not a flip of its latents, so augmented data is encoded anew in every epoch.
    if data.augment != "none" or not data.cache_latents:
        return encoding.spread(sources["train"].source), []
    parts = {
        # The format is part of the key: latents that were encoded in bf16 differ from those in fp32.
        "autoencoder": compute_weights_digest(model.autoencoder),
        "format": name_computed_format(model, precision),
        "size": str(data.size),
        "channels": str(data.channels),
    }
    kept = {
        split: load_or_encode_latents(encoding, source.source, parts=parts, on_progress=on_progress)
        for split, source in sources.items()
    }
    for split, source in sources.items():
        source.latents = kept[split]
    return kept["train"].spread(), [line for latents in kept.values() for line in latents.notes]


def name_computed_format(model: LatentDiffusion, precision: Precision) -> str:
    """Return the name of the format the autoencoder computes in, for the cache key.

    The autoencoder may be an island as a whole (by recipe or by a guard), or in some of its modules only.
    """
    assert model.autoencoder is not None
    if not precision.casts:
        return precision.name  # islands compute in tf32 where the run was asked to
    raised = find_islands(model.autoencoder)
    if "" in raised:
        return "fp32"
    return f"{precision.name} but for {', '.join(sorted(raised))}" if raised else precision.name


def _compute_moments(model: LatentDiffusion, precision: Precision, device: torch.device, images: Tensor) -> Tensor:
    with precision.inference(device):
        return model.moments(images)


PARTS = {"class": "label", "image": "condition", "embedding": "embedding"}
"""The field of a sample that holds each kind of condition."""


class Diffusion(Task):
    """A task that trains an autoencoder, a denoiser of its latents, or both, and draws samples."""

    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    resolution: ClassVar[str] = "data.size"
    forward_methods: ClassVar[Sequence[str]] = ("moments", "pixels", "denoise")
    tiny: ClassVar[Mapping[str, object]] = {
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
        """Check the recipe and prepare the parts of the model. Raise `BadRecipe` for settings that exclude each
        other.
        """
        super().begin(recipe)
        check(recipe)
        options, data = recipe.model, recipe.data
        # An autoencoder has no condition; the setting in the recipe is for the denoiser.
        self.kind: str = "none" if options.stage == "autoencoder" else options.condition
        self.pixels, self.conditions = (
            _build_center_normalization(data.channels),
            _build_center_normalization(data.condition_channels),
        )
        self.origins = PartBuilder(options, data, recipe.run.dir)
        self._view = v2.Compose([v2.Resize(data.size, antialias=True), v2.CenterCrop(data.size)])
        self._classes: list[str] = []
        self._embedding: list[int] = []
        self._sources: dict[Split, LatentSource] = {}

    @property
    def classes(self) -> list[str]:
        """Return the class names a sample can be conditioned on, restored from a run or read from the data."""
        if self.kind == "class" and not self._classes:
            self._read()
        return self._classes

    @property
    def embedding(self) -> list[int]:
        """Return the tokens and width of an embedding, restored from a run or read from the data; empty without one."""
        if self.kind == "embedding" and not self._embedding:
            first = self._wanted(1, torch.get_default_device())
            self._embedding = [] if first is None else list(first.given.shape[1:])
        return self._embedding

    @property
    def channels_read(self) -> int:
        """Return how many channels the image that `predict` takes must have."""
        data = self.recipe.data
        return int(data.condition_channels if self.kind == "image" else data.channels)

    def facts(self) -> dict[str, Any]:
        """Return the classes, the embedding shape and the configs of the parts."""
        known = {"classes": self.classes, "embedding": self.embedding}
        return {name: value for name, value in known.items() if value} | self.origins.facts()

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts of a run."""
        self._classes = list(facts.get("classes", self._classes))
        self._embedding = list(facts.get("embedding", self._embedding))
        self.origins.remember(facts)

    def model(self) -> nn.Module:
        """Return the autoencoder and the denoiser of the recipe as one model."""
        data = self.recipe.data
        width = self.embedding[-1] if self.embedding else 0
        asked = ConditionSpec(self.kind, len(self.classes), data.condition_channels, width)
        return build_latent_diffusion(self.recipe.model, data, asked, self.origins)

    def ready(self, model: nn.Module, precision: Precision, on_progress: OnProgress = ignore_progress) -> list[str]:
        """Encode the data once where the autoencoder is frozen, and measure the scale of its latents.

        Return lines to report. Raise `BadData` if no scale can be measured.
        """
        assert isinstance(model, LatentDiffusion)
        if not model.frozen or model.autoencoder is None:
            return self.origins.notes
        if not self._sources:
            self._read()
        moments, told_of = cache_latents_if_possible(
            model, precision, self.recipe, self._sources, self._image, on_progress
        )
        lines = [*self.origins.notes, *told_of]
        if model.latent_scale > 0.0:
            # A scale that was published with the autoencoder stays; the user is only warned if it does not fit.
            return lines + describe_scale_misfit(model.latent_scale.item(), moments)
        scale = measure_latent_scale(moments)
        model.latent_scale.fill_(scale)
        return [*lines, f"latents are multiplied by {scale:.4g}, one over their standard deviation"]

    def source(self, split: Split) -> Source:
        """Return the samples of a split; the data is read on the first call."""
        if not self._sources:
            self._read()
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Resize and normalize a sample; for training, flip the image and its condition together."""
        # Moments are passed on as they are: latents are cached only where the data is not augmented.
        ready: Sample = {name: sample[name] for name in ("moments", "label") if name in sample}
        if "image" in sample:
            ready["image"] = self._image(sample)
        if self.kind == "image":
            ready["condition"] = self._seen(sample["condition"], self.conditions)
        if self.kind == "embedding":
            # Tokens × width; a single vector is one token.
            embedding = sample["embedding"]
            ready["embedding"] = embedding if embedding.ndim == 2 else embedding.unsqueeze(0)
        if split == "train" and self.recipe.data.augment == "flip" and torch.rand(()) < 0.5:
            ready |= {name: ready[name].flip(-1) for name in ("image", "condition") if name in ready}
        return ready

    def loss(self, model: nn.Module, batch: Sample, metrics: Metrics | None = None) -> Tensor:
        """Return the sum of the autoencoder's and the denoiser's loss, as far as the stage trains them."""
        assert isinstance(model, LatentDiffusion)
        draws = Draws.for_model(model)
        moments, latents = _compute_batch_latents(model, batch, draws)
        losses: list[Tensor] = []
        told: dict[str, Tensor] = {}
        if moments is not None and not model.frozen:
            image, predicted = batch["image"], model.pixels(latents)
            losses.append(
                compute_reconstruction_loss(predicted, image)
                + self.recipe.loss.kl * compute_kl_divergence(moments, image)
            )
            told |= {"preds": predicted.detach(), "target": image}
        if model.denoiser is not None:
            # Detached: otherwise the autoencoder would learn latents that are easy to denoise but carry little
            # information.
            errors, timesteps = self._errors(model, latents.detach(), batch, draws)
            losses.append((model.noise.weights(timesteps, self.recipe.loss.min_snr) * errors).mean())
            told |= {"errors": errors.detach(), "at": timesteps}
        if metrics is not None:
            metrics.update(**told)
        return torch.stack(losses).sum()

    def metrics(self) -> Metrics:
        """Return PSNR for an autoencoder, and the denoising error by noise level for a denoiser."""
        options = self.recipe.model
        found: dict[str, Metric] = {}
        if options.stage != "denoiser":
            found["psnr"] = PeakSignalNoiseRatio((-1.0, 1.0))
        if options.stage != "autoencoder":
            found["denoising"] = DenoisingByNoise(options.timesteps)
        return Metrics(found)

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """Return, per sample, the condition image, the original, its reconstruction, and a generated sample, as far as
        they exist.
        """
        assert isinstance(model, LatentDiffusion)
        moments, latents = _compute_batch_latents(model, batch, None)
        decoded = model.pixels(latents)
        columns = [batch.get("image", decoded)]
        if moments is not None and not model.frozen:
            columns.append(decoded)
        if model.denoiser is not None:
            # The same noise in every evaluation, so that pictures of different epochs can be compared.
            columns.append(self._samples(model, len(latents), self._condition(batch), Draws.same_each_time()))
        shown = [[self.pixels.shown(image) for image in column] for column in columns]
        if self.kind == "image":
            shown.insert(0, [self.conditions.shown(image) for image in batch["condition"]])
        return [images.join_pictures(row) for row in zip(*shown, strict=True)]

    @property
    def generates(self) -> bool:
        """Whether samples need no image: an autoencoder and an image condition do."""
        return self.recipe.model.stage != "autoencoder" and self.kind != "image"

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """Return a sample for a condition image, or the reconstruction of an image.

        Raise `WrongUse` for an image with the wrong number of channels, or for a model that takes no image.
        """
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
                "a folder of images for a model that generates images and reads none",
                allowed="no folder",
                do="halfstep predict RUN, without a folder",
            )
        return self._reconstructed(model, seen)

    def sample(self, model: nn.Module, count: int, on_progress: OnProgress) -> list[Picture]:
        """Draw samples for the classes in turn, or for the first conditions of the validation set.

        A condition image is shown next to its sample. `on_progress` receives the progress.
        """
        assert isinstance(model, LatentDiffusion)
        if model.denoiser is None:
            return super().sample(model, count, on_progress)
        condition = self._wanted(count, model.latent_scale.device)
        drawn = self._samples(model, count, condition, Draws(), on_progress)
        pictures = [self.pixels.shown(image) for image in drawn]
        if condition is None or self.kind != "image":
            return pictures
        asked = [self.conditions.shown(image) for image in condition.given]
        return [images.join_pictures(pair) for pair in zip(asked, pictures, strict=True)]

    def _read(self) -> None:
        sources, names = build_diffusion_sources(self.recipe.data, self.kind, self.recipe.store)
        self._sources = {split: LatentSource(source) for split, source in sources.items()}
        self._classes = self._classes or names

    def _image(self, sample: Sample) -> Tensor:
        return self._seen(sample["image"], self.pixels)

    def _seen(self, image: Tensor, pixels: images.PixelNormalization) -> Tensor:
        # Few torchvision transforms support 16-bit integers. 8-bit images are resized before the conversion, which is
        # cheaper.
        return pixels.normalized(self._view(image if image.dtype == torch.uint8 else scale_to_unit_range(image)))

    def _errors(self, model: LatentDiffusion, latents: Tensor, batch: Sample, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the denoiser's squared error for each sample, and the timesteps it was evaluated at."""
        timesteps, noise = draws.timesteps(latents, len(model.noise)), draws.normal(latents)
        condition = self._condition(batch)
        if condition is not None and model.training:
            # Classifier-free guidance needs a denoiser that has also learned to work without a condition.
            condition = condition.dropped(self.recipe.model.condition_drop)
        predicted = model.denoise(model.noise.noisy(latents, noise, timesteps), timesteps, condition)
        return compute_squared_errors(predicted, model.noise.target(latents, noise, timesteps)), timesteps

    def _condition(self, batch: Sample) -> Condition | None:
        return None if self.kind == "none" else Condition.of(batch[PARTS[self.kind]])

    def _wanted(self, count: int, device: torch.device) -> Condition | None:
        if self.kind == "none":
            return None
        if self.kind == "class":
            return build_class_conditions(len(self.classes), count, device)
        ready = functools.partial(self.transform, "val")
        return read_first_conditions(self.source("val"), ready, PARTS[self.kind], count, device)

    def _samples(
        self,
        model: LatentDiffusion,
        count: int,
        condition: Condition | None,
        draws: Draws,
        on_progress: OnProgress = ignore_progress,
    ) -> Tensor:
        data = self.recipe.data
        shape = model.latent_shape(count, data.channels, data.size)
        return generate_images(model, self.recipe.model, shape, condition, draws, on_progress)

    def _answered(self, model: LatentDiffusion, asked: Tensor) -> Prediction:
        predicted = self._samples(model, 1, Condition.of(asked), Draws.same_each_time())[0]
        pair = [self.conditions.shown(asked[0]), self.pixels.shown(predicted)]
        return Prediction(
            values={"mean": (0.5 + 0.5 * predicted).clamp(0.0, 1.0).mean().item()}, overlay=images.join_pictures(pair)
        )

    def _reconstructed(self, model: LatentDiffusion, image: Tensor) -> Prediction:
        _, latents = _compute_batch_latents(model, {"image": image}, None)
        predicted = model.pixels(latents).clamp(-1.0, 1.0)
        # A perfect reconstruction would have an infinite PSNR.
        error = max(compute_reconstruction_loss(predicted, image).item(), 1e-10)
        pair = [self.pixels.shown(image[0]), self.pixels.shown(predicted[0])]
        # The peak signal is 2: pixels lie in -1..1.
        return Prediction(values={"psnr": 10.0 * math.log10(4.0 / error)}, overlay=images.join_pictures(pair))


def _compute_batch_latents(model: LatentDiffusion, batch: Sample, draws: Draws | None) -> tuple[Tensor | None, Tensor]:
    """Return the moments and latents of a batch, from the cache or encoded now; without `draws`, latents are the mean.

    Without an autoencoder there are no moments, and the latents are the pixels.
    """
    if model.autoencoder is None:
        return None, batch["image"]
    moments = batch["moments"] if "moments" in batch else model.moments(batch["image"])
    return moments, model.latents(moments, torch.zeros_like if draws is None else draws.normal)


def _build_center_normalization(channels: int) -> images.PixelNormalization:
    """Return the normalization to -1..1 that diffusers' autoencoders expect."""
    return images.PixelNormalization((0.5,) * channels, (0.5,) * channels)
