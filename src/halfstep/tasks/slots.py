"""Object-centric video: slots that find objects without labels and follow them from frame to frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.data.dataset import BadSample, Sample, Source
from halfstep.data.image_io import scale_to_unit_range
from halfstep.formats import widest_dtype
from halfstep.precision.island import island
from halfstep.status_line import OnProgress
from halfstep.tasks.models.slots.model import build_slot_model, compute_temporal_contrast
from halfstep.tasks.options.slots import SCHEMA, check
from halfstep.tasks.shared import images
from halfstep.tasks.shared.confusion import count_confusion
from halfstep.tasks.shared.sources import build_clip_sources, has_object_masks
from halfstep.train.metrics import Metric, Metrics
from halfstep.train.task import Picture, Prediction, Split, Task

MOST_FRAMES = 8
"""The most frames in a row; those of a longer clip are spaced evenly over its length."""
GAP = 2


def draw_slot_overlays(frames: Sequence[Picture], masks: Any, slots: int) -> list[Picture]:
    """Return each frame in gray with the color of the owning slot over every pixel.

    `masks` holds slot indices, frames × height × width. Frames are gray because object colors mixed with slot colors
    would show neither.
    """
    # The palette's first color is black for the background, but slots treat the background as one more object: skip it.
    drawn = []
    for frame, mask in zip(frames, masks, strict=True):
        gray: Picture = frame.mean(2, keepdims=True).round().astype(np.uint8).repeat(3, 2)
        drawn.append(images.overlay_mask(gray, _convert_mask_to_array(mask) + 1, slots + 1))
    return drawn


def draw_clip_picture(frames: Sequence[Picture], masks: Any, slots: int, truth: Any = None) -> Picture:
    """Draw a row of frames, a row of their slots below it, and a row of the true objects where they are known."""
    shown = np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().astype(int).tolist()
    some = [frames[n] for n in shown]
    rows = [some, draw_slot_overlays(some, [masks[n] for n in shown], slots)]
    if truth is not None:
        most = int(truth.max()) + 1
        things = [_convert_mask_to_array(truth[n]) for n in shown]
        rows.append([images.color_mask(mask, most) for mask in things])
    # Transposed, so that the rows are stacked vertically.
    columns = [images.join_pictures(row, GAP).swapaxes(0, 1) for row in rows]
    return images.join_pictures(columns, GAP).swapaxes(0, 1)


def _convert_mask_to_array(mask: Any) -> images.Mask:
    """Return a mask as an integer array; it may be an array, or a tensor on any device."""
    numbers: images.Mask = torch.as_tensor(mask).cpu().long().numpy()
    return numbers


THINGS = 256
"""Values of an 8-bit mask; 0 is the background."""
UNIT = 2**40
"""Scores are summed as integer multiples of 1 / UNIT: exact to twelve digits, and independent of the order."""


class _ClipMetric(Metric):
    """The mean of a score over the clips that have one."""

    scores: Tensor
    clips: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__(scores=torch.zeros((), dtype=torch.int64), clips=torch.zeros((), dtype=torch.int64))
        self.slots = slots

    def update(self, said: Tensor, truth: Tensor) -> None:
        """Add slot indices and object numbers, both clips × frames × height × width (or clips × anything)."""
        counts = count_confusion(truth, said, (THINGS, self.slots))
        # float64 where the device has it: float32 holds integers exactly only up to 2**24, fewer than a clip has pairs
        # of pixels.
        scores = self._scores(counts.to(widest_dtype(counts.device)))
        judged = ~scores.isnan()
        self.scores = self.scores + (torch.where(judged, scores, 0.0) * UNIT).round().long().sum()
        self.clips = self.clips + judged.sum()

    def compute(self) -> Tensor:
        """Return the mean score; NaN where no clip had an object."""
        return self.total("scores") / UNIT / self.total("clips")

    def _scores(self, counts: Tensor) -> Tensor:
        """Return a score per clip from counts of clips × objects × slots; NaN where a clip has none."""
        raise NotImplementedError


class ForegroundAri(_ClipMetric):
    """The adjusted Rand index over foreground pixels: 1 for a perfect partition, about 0 for a random one.

    How the background is divided does not count. For a clip with one object, one slot scores 1 and several score 0.
    """

    def _scores(self, counts: Tensor) -> Tensor:
        things = counts[:, 1:]
        together = _count_pairs(things).sum((1, 2))
        in_truth, in_slots = _count_pairs(things.sum(2)).sum(1), _count_pairs(things.sum(1)).sum(1)
        pixels = things.sum((1, 2))
        by_chance = in_truth * in_slots / _count_pairs(pixels).clamp(min=1.0)
        most = (in_truth + in_slots) / 2.0
        # The index is 0 / 0 where both partitions are a single group, or where every pixel is its own group: they
        # agree.
        score = torch.where(most > by_chance, (together - by_chance) / (most - by_chance), 1.0)
        return torch.where(pixels > 0, score, torch.nan)


class BestOverlap(_ClipMetric):
    """Mean best overlap (mBO): for each object the IoU with its best slot, averaged over the objects of a clip."""

    def _scores(self, counts: Tensor) -> Tensor:
        both = counts[:, 1:]
        truth, slots = both.sum(2, keepdim=True), counts.sum(1, keepdim=True)
        best = (both / (truth + slots - both).clamp(min=1.0)).amax(2)
        # An object that is hidden in every frame has no pixels and does not count.
        there = truth[..., 0] > 0
        return torch.where(there, best, 0.0).sum(1) / there.sum(1)


def _count_pairs(count: Tensor) -> Tensor:
    return count * (count - 1.0) / 2.0


class Slots(Task):
    """A task that divides video clips into slots, trained without labels by reconstruction."""

    schema: ClassVar[Any] = SCHEMA
    resolution: ClassVar[str] = "data.size"
    tiny: ClassVar[Mapping[str, object]] = {
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
        """Check the recipe. Raise `BadRecipe` for settings that exclude each other."""
        super().begin(recipe)
        check(recipe)
        self._sources: dict[Split, Source] = {}
        self._truth: bool | None = None

    @property
    def truth(self) -> bool:
        """Return whether the data has object masks, restored from a run or looked up in the data."""
        if self._truth is None:
            self._truth = has_object_masks(self.recipe.data)
        return self._truth

    @property
    def metric(self) -> str:  # type: ignore[override]
        """Return the metric that ranks checkpoints: the loss, where the data has no masks."""
        return "fg_ari" if self.truth else "loss"

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return self.truth

    def facts(self) -> dict[str, Any]:
        """Return whether the data has object masks."""
        return {"truth": self.truth}

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Restore whether the training data had object masks."""
        self._truth = facts.get("truth", self._truth)

    def model(self) -> nn.Module:
        """Return the slot model of the recipe."""
        data = self.recipe.data
        return build_slot_model(self.recipe.model, data.channels, data.size, data.frames)

    def source(self, split: Split) -> Source:
        """Return the clips of a split; the data is read on the first call."""
        if not self._sources:
            self._sources = build_clip_sources(self.recipe.data)
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Resize whole frames to a square in -1..1; flip half of the training clips."""
        size = self.recipe.data.size
        frames = scale_to_unit_range(sample["image"])
        if frames.shape[-2:] != (size, size):
            frames = F.interpolate(frames, (size, size), mode="bilinear", antialias=True)
        ready = {"image": frames * 2.0 - 1.0}
        if "mask" in sample:
            # Plain `nearest` shifts the mask by up to half a pixel against the frame; `nearest-exact` does not.
            ready["mask"] = F.interpolate(sample["mask"][:, None], (size, size), mode="nearest-exact")[:, 0]
        if split == "train" and torch.rand(()) < 0.5:
            ready = {name: tensor.flip(-1) for name, tensor in ready.items()}
        return ready

    def loss(self, model: nn.Module, batch: Sample, metrics: Metrics | None = None) -> Tensor:
        """Return the reconstruction loss plus the weighted token and temporal contrast losses."""
        seen, weights = model(batch["image"]), self.recipe.loss
        if metrics is not None and "mask" in batch:
            metrics.update(find_owning_slots(seen.shares.detach(), batch["mask"].shape[-2:]), batch["mask"])
        loss: Tensor = seen.reconstruction + weights.tokens * seen.tokens
        if weights.contrast:
            # In evaluation each clip is contrasted with itself alone: otherwise its loss would depend on its batch.
            apart = [seen.slots] if model.training else seen.slots.split(1)
            contrasts = [compute_temporal_contrast(slots, weights.temperature) for slots in apart]
            loss = loss + weights.contrast * torch.stack(contrasts).mean()
        return loss

    def metrics(self) -> Metrics:
        """Return FG-ARI and mBO where the data has masks."""
        slots = self.recipe.model.slots
        return Metrics({"fg_ari": ForegroundAri(slots), "mbo": BestOverlap(slots)} if self.truth else {})

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """Return, per clip, a row of frames, a row of owning slots, and a row of true masks where they are known."""
        said = find_owning_slots(model(batch["image"]).shares, batch["image"].shape[-2:])
        truths = batch.get("mask", [None] * len(said))
        return [
            draw_clip_picture(
                [images.convert_to_picture((frame + 1.0) / 2.0) for frame in clip],
                answer,
                self.recipe.model.slots,
                truth,
            )
            for clip, answer, truth in zip(batch["image"], said, truths, strict=True)
        ]

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """Return the slots of one frame, or of a clip (frames × channels × height × width).

        `mask` is that of the first frame.
        """
        clip = image if image.ndim == 4 else image[None]
        device, slots = next(model.parameters()).device, self.recipe.model.slots
        seen = model(self.transform("val", {"image": clip})["image"][None].to(device))
        # Frame by frame, to bound memory: a video may have a hundred times the model's pixels.
        said = torch.cat(
            [find_owning_slots(shares, clip.shape[-2:]).cpu() for shares in seen.shares[0, :, None, None]]
        )[:, 0]
        owned = torch.bincount(said.flatten(), minlength=slots).double() / said.numel()
        laid_over = draw_slot_overlays([images.convert_to_picture(frame) for frame in clip], said, slots)
        return Prediction(
            values={
                "frames": len(clip),
                # A slot may own no pixel: the number of slots is fixed, the number of objects is not.
                "slots_used": int((owned > 0).sum()),
                **{f"pixels_slot_{number}": share for number, share in enumerate(owned.tolist())},
            },
            mask=said[0].to(torch.uint8).numpy(),
            overlay=laid_over[0],
            frames=laid_over if image.ndim == 4 else (),
        )

    @torch.no_grad()
    def sample(self, model: nn.Module, count: int, on_progress: OnProgress) -> list[Picture]:
        """Draw the first readable validation clips as `pictures` does."""
        source, device = self.source("val"), next(model.parameters()).device
        count, drawn = min(count, len(source)), []
        for number in range(count):
            try:
                batch = self.collate("val", [self.transform("val", source.read(number))])
            except BadSample:
                continue
            drawn += self.pictures(model, {name: tensor.to(device) for name, tensor in batch.items()})
            on_progress(number + 1, count)
        return drawn


@island
def find_owning_slots(shares: Tensor, size: torch.Size) -> Tensor:
    """Return the slot with the largest share of each pixel, clips × frames × height × width.

    `shares` may have any resolution; they are interpolated to `size`.
    """
    if shares.shape[-2:] != size:
        shares = F.interpolate(shares.flatten(0, 1), size, mode="bilinear").unflatten(0, shares.shape[:2])
    return shares.argmax(2)
