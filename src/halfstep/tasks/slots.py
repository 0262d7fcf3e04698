"""The things in a video, found without being told: slots that each follow one of them from frame to frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection

from halfstep.errors import BadRecipe
from halfstep.precision.island import island
from halfstep.tasks._clips import clips, has_masks
from halfstep.tasks._pixels import as_picture
from halfstep.tasks._slots.drawing import clip_picture, overlays
from halfstep.tasks._slots.metrics import BestOverlap, ForegroundAri
from halfstep.tasks.models.slots.contrast import temporal_contrast
from halfstep.tasks.models.slots.model import slot_model
from halfstep.tasks.options.slots import SCHEMA
from halfstep.train.data.reading import scaled
from halfstep.train.data.source import BadSample, Sample, Source
from halfstep.train.task import Picture, Prediction, Split, Task, Told


class Slots(Task):
    schema: ClassVar[Any] = SCHEMA
    tiny: ClassVar[Mapping[str, Any]] = {
        "model": {
            "slots": 3,
            "width": 16,
            "iterations": 1,
            "encoder_width": 8,
            "encoder_stride": 2,
            "decoder_width": 8,
            "decoder_layers": 2,
            "vocabulary": 16,
        },
        "data": {"name": "shapes", "size": 16, "frames": 3, "objects": 2, "samples": 20, "val": 0.3},
        "loss": {},
    }

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        _check(recipe)
        self._sources: dict[Split, Source] = {}
        self._truth: bool | None = None

    @property
    def truth(self) -> bool:
        """Whether the data says which pixels belong together: remembered from training, or seen in the data."""
        if self._truth is None:
            self._truth = has_masks(self.recipe.data)
        return self._truth

    @property
    def metric(self) -> str:  # type: ignore[override]
        """Without truth there is nothing but the loss to go by."""
        return "fg_ari" if self.truth else "loss"

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return self.truth

    def facts(self) -> dict[str, Any]:
        return {"truth": self.truth}

    def remember(self, facts: Mapping[str, Any]) -> None:
        self._truth = facts.get("truth", self._truth)

    def model(self) -> nn.Module:
        data = self.recipe.data
        return slot_model(self.recipe.model, data.channels, data.size, data.frames)

    def source(self, split: Split) -> Source:
        if not self._sources:
            self._sources = clips(self.recipe.data)
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Whole frames, squeezed into a square; half of the clips for training are mirrored."""
        ready = {"image": _resized(scaled(sample["image"]), self.recipe.data.size) * 2.0 - 1.0}
        if "mask" in sample:
            ready["mask"] = _resized_mask(sample["mask"], self.recipe.data.size)
        if split == "train" and torch.rand(()) < 0.5:
            ready = {name: tensor.flip(-1) for name, tensor in ready.items()}
        return ready

    def loss(self, model: nn.Module, batch: Sample, metrics: MetricCollection | None = None) -> Tensor:
        seen, weights = model(batch["image"]), self.recipe.loss
        if metrics is not None and "mask" in batch:
            metrics.update(owners(seen.shares.detach(), batch["mask"].shape[-2:]), batch["mask"])
        loss: Tensor = seen.reconstruction + weights.tokens * seen.tokens
        if weights.contrast:
            # Held against the other clips of a batch, a clip would be judged by how evaluation cuts its batches.
            apart = [seen.slots] if model.training else seen.slots.split(1)
            contrasts = [temporal_contrast(slots, weights.temperature) for slots in apart]
            loss = loss + weights.contrast * torch.stack(contrasts).mean()
        return loss

    def metrics(self) -> MetricCollection:
        slots = self.recipe.model.slots
        return MetricCollection({"fg_ari": ForegroundAri(slots), "mbo": BestOverlap(slots)} if self.truth else {})

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """The frames of a clip in a row, below them the slots that own their pixels, and the truth where known."""
        said = owners(model(batch["image"]).shares, batch["image"].shape[-2:])
        truths = batch.get("mask", [None] * len(said))
        return [
            clip_picture(_shown(clip), answer, self.recipe.model.slots, truth)
            for clip, answer, truth in zip(batch["image"], said, truths, strict=True)
        ]

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """Of one frame, or of a clip: frames × channels × height × width. The mask is the first frame's."""
        clip = image if image.ndim == 4 else image[None]
        device, slots = next(model.parameters()).device, self.recipe.model.slots
        seen = model(self.transform("val", {"image": clip})["image"][None].to(device))
        # Frame by frame: a film's own size may be a hundred times the model's.
        said = torch.cat([owners(shares, clip.shape[-2:]).cpu() for shares in seen.shares[0, :, None, None]])[:, 0]
        owned = torch.bincount(said.flatten(), minlength=slots).double() / said.numel()
        laid_over = overlays([as_picture(frame) for frame in clip], said, slots)
        return Prediction(
            values={
                "frames": len(clip),
                "slots_used": int((owned > 0).sum()),
                **{f"pixels_slot_{number}": share for number, share in enumerate(owned.tolist())},
            },
            mask=said[0].to(torch.uint8).numpy(),
            overlay=laid_over[0],
            frames=laid_over if image.ndim == 4 else (),
        )

    @torch.no_grad()
    def sample(self, model: nn.Module, count: int, told: Told) -> list[Picture]:
        """The first clips of validation that can be read, as `pictures` draws them."""
        source, device = self.source("val"), next(model.parameters()).device
        count, drawn = min(count, len(source)), []
        for number in range(count):
            try:
                batch = self.collate("val", [self.transform("val", source.read(number))])
            except BadSample:
                continue
            drawn += self.pictures(model, {name: tensor.to(device) for name, tensor in batch.items()})
            told(number + 1, count)
        return drawn


@island
def owners(shares: Tensor, size: torch.Size) -> Tensor:
    """The slot that has most of each pixel: clips × frames × height × width, from shares in any resolution."""
    if shares.shape[-2:] != size:
        shares = F.interpolate(shares.flatten(0, 1), size, mode="bilinear").unflatten(0, shares.shape[:2])
    return shares.argmax(2)


def _shown(clip: Tensor) -> list[Picture]:
    """From what the model sees to pictures."""
    return [as_picture((frame + 1.0) / 2.0) for frame in clip]


def _resized(frames: Tensor, size: int) -> Tensor:
    if frames.shape[-2:] == (size, size):
        return frames
    return F.interpolate(frames, (size, size), mode="bilinear", antialias=True)


def _resized_mask(mask: Tensor, size: int) -> Tensor:
    return F.interpolate(mask[:, None], (size, size), mode="nearest-exact")[:, 0]


def _check(recipe: Any) -> None:
    model, data = recipe.model, recipe.data
    if model.weights == "pretrained":
        raise BadRecipe("model.weights=pretrained for slots", allowed="none, or a path", do="write model.weights=none")
    strides = {"encoder_stride": model.encoder_stride}
    if model.decoder == "autoregressive":
        strides["token_stride"] = model.token_stride
    for field, stride in strides.items():
        if data.size % stride:
            raise BadRecipe(
                f"data.size={data.size} with model.{field}={stride}",
                allowed=f"multiples of {stride}",
                do=f"write data.size={-(-data.size // stride) * stride}",
            )
    if model.decoder == "autoregressive" and model.decoder_width % model.heads:
        raise BadRecipe(
            f"model.decoder_width={model.decoder_width} with model.heads={model.heads}",
            allowed="a width that is a multiple of the heads",
            do=f"write model.decoder_width={-(-model.decoder_width // model.heads) * model.heads}",
        )
