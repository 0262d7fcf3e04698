"""Read frames with a frozen model of timm, such as a ViT that DINO trained."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import BadData, BadRecipe, HalfstepError, StateMismatch, format_error_line
from halfstep.tasks.models.timm_models import import_timm
from halfstep.tasks.shared.images import choose_normalization
from halfstep.tasks.shared.pretrained import build_with_fetched_weights
from halfstep.train.weights import has_finite_weights, read_tensors

FIELD, WEIGHTS = "model.backbone", "model.backbone_weights"


class FrozenBackbone(nn.Module):
    """A model of timm that is not trained: always in eval mode, without gradients."""

    mean: Tensor
    std: Tensor

    def __init__(self, name: str, weights: str, size: int) -> None:
        super().__init__()
        timm = import_timm(FIELD, name)
        settings = timm.get_pretrained_cfg(name)
        model: Any = _build_backbone(timm, name, weights, size, settings).requires_grad_(False)
        self.model = model
        pixels = choose_normalization(3) if settings is None else settings
        # As the backbone was trained, from frames in -1 .. 1. Not persistent: the name of the backbone implies them.
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (pixels.mean, pixels.std))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.width: int = model.num_features
        self.eval()
        self.places = self._side(name, size)

    def train(self, mode: bool = True) -> FrozenBackbone:
        """Stay in eval mode: batch statistics and dropout would change what the slots see."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        """Return N × positions × width, of frames in -1 .. 1."""
        seen: Tensor = self.model.forward_features(((frames + 1.0) / 2.0 - self.mean) / self.std)
        if seen.ndim == 3:
            return seen[:, getattr(self.model, "num_prefix_tokens", 0) :]  # without class and register tokens
        channels_first = seen.shape[1] == self.width
        return seen.flatten(2).transpose(1, 2) if channels_first else seen.flatten(1, 2)

    def _side(self, name: str, size: int) -> int:
        """Return the positions per side. Raise `BadRecipe` for a model whose features are no square map."""
        seen = self(torch.zeros(1, 3, size, size))
        side = math.isqrt(seen.shape[1])
        if seen.shape[1:] != (side**2, self.width) or side < 2:
            raise BadRecipe(
                f"{FIELD}={name} with data.size={size}: its features are {tuple(seen.shape[1:])}",
                allowed="models with a square map of features, such as ViTs and ResNets, and frames of several patches",
                do="write another data.size, or model.backbone=vit_small_patch16_224.dino",
            )
        return side


class BackboneEncoder(nn.Module):
    """A frozen backbone, and a trained MLP that maps its features to the width of the slots."""

    def __init__(self, name: str, weights: str, out: int, size: int) -> None:
        super().__init__()
        self.backbone = FrozenBackbone(name, weights, size)
        width = self.backbone.width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, frames: Tensor) -> Tensor:
        """Return N × positions × out."""
        out: Tensor = self.mlp(self.backbone(frames))
        return out


def _build_backbone(timm: Any, name: str, weights: str, size: int, settings: Any) -> nn.Module:
    """Return the model with its weights. Raise `BadRecipe`, `BadData`, `StateMismatch` or `Unsafe`."""
    arguments: dict[str, object] = {"num_classes": 0}
    # Only models with a fixed input size accept img_size; others raise TypeError for it.
    if settings is not None and settings.fixed_input_size:
        arguments["img_size"] = size

    def build(pretrained: bool) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
        return model

    try:
        if weights == "pretrained":
            if settings is None or not (settings.hf_hub_id or settings.url):
                raise BadRecipe(
                    f"{WEIGHTS}=pretrained with {FIELD}={name}",
                    allowed="models that timm has weights for, none, or a path",
                    do=f"write {WEIGHTS}=FILE.safetensors, or choose another model",
                )
            return build_with_fetched_weights(
                lambda: build(True), name, settings.hf_hub_id or "", settings.url or "", WEIGHTS
            )
        model = build(False)
    # Some of halfstep's errors derive from ValueError too, and must not be wrapped again.
    except HalfstepError:
        raise
    except (TypeError, AssertionError, ValueError) as error:
        raise BadRecipe(
            f"{FIELD}={name} cannot be built for frames of {size} pixels: {error}",
            allowed="the sizes that this model has in timm",
            do="change data.size or model.backbone",
        ) from error
    if weights != "none":
        _load_backbone_weights(model, Path(os.path.expanduser(weights)))
    return model


def _load_backbone_weights(model: nn.Module, path: Path) -> None:
    """Load a file of tensors; names and positions of other projects and sizes are converted as timm does."""
    if not path.exists():
        raise BadData(
            f"no weights at {path}",
            allowed=f"{WEIGHTS}: pretrained, none, or a file",
            do=f"check the path in {WEIGHTS}",
        )
    tensors = read_tensors(path)
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        tensors = tensors if convert is None else convert(tensors, model)
        # The file may contain a head that the backbone lacks, but it must contain every tensor of the backbone.
        missing, _ = model.load_state_dict(tensors, strict=False)
    except (RuntimeError, KeyError, AttributeError, ValueError) as error:
        missing, reason = ["..."], format_error_line(error)[:200]
    else:
        reason = f"{len(missing)} tensors are not in it, such as {missing[0]}" if missing else ""
    if missing:
        raise StateMismatch(
            f"{path} does not fit the backbone: {reason}",
            allowed="the weights of the model that model.backbone names",
            do="check model.backbone against the model that the file was made with",
        )
    if not has_finite_weights(model):
        raise BadData(f"{path} has weights that are not finite", allowed="finite weights", do="give another file")
