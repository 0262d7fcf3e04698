"""Autoencoder, denoiser and noise schedule as one model whose parts are called separately."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from halfstep.errors import BadRecipe
from halfstep.precision.precision import widen
from halfstep.tasks.latent_cache.encoding import split_moments
from halfstep.tasks.models.latent.noise import NoiseSchedule

CHANNELS_A_GROUP = 4
"""The least channels per normalization group, where widths allow it: a group of one channel would lose its mean."""
MOST_GROUPS = 32


def build_autoencoder_config(options: Any, channels: int, size: int) -> dict[str, object]:
    """Return the config of a new autoencoder, plain data for `AutoencoderKL(**config)`."""
    widths = list(options.autoencoder_widths)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "block_out_channels": widths,
        "layers_per_block": options.autoencoder_layers,
        "latent_channels": options.latent_channels,
        "norm_num_groups": choose_norm_groups(widths),
        "sample_size": size,
    }


def build_autoencoder(config: Mapping[str, object]) -> AutoencoderKL:
    """Return an autoencoder with random weights."""
    module: AutoencoderKL = AutoencoderKL(**config)
    return module


def choose_norm_groups(widths: Sequence[int]) -> int:
    """Return the largest number of groups that divides all widths and leaves each group enough channels."""
    common = math.gcd(*widths)
    most = max(1, min(MOST_GROUPS, common // CHANNELS_A_GROUP))
    return max(groups for groups in range(1, most + 1) if common % groups == 0)


def compute_latent_stride(config: Mapping[str, Any]) -> int:
    """Return how many pixels, per side, become one latent position."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


@dataclass(frozen=True)
class Condition:
    """The conditions of a batch, one row per sample, with a mask of the rows that count."""

    given: Tensor
    """Class indices, images, or embeddings (tokens × width)."""
    kept: Tensor
    """True for rows that count; the others are absent."""

    @classmethod
    def of(cls, given: Tensor) -> Condition:
        """Return a condition in which every row counts."""
        return cls(given, torch.ones(len(given), dtype=torch.bool, device=given.device))

    def dropped(self, share: float) -> Condition:
        """Return the condition with a random share of its rows absent."""
        return Condition(self.given, self.kept & (torch.rand(len(self.given), device=self.given.device) >= share))

    def absent(self) -> Condition:
        """Return the condition with every row absent."""
        return Condition(self.given, torch.zeros_like(self.kept))

    def twice(self) -> Condition:
        """Return all rows followed by the same rows as absent, for guidance in one batch."""
        return Condition(torch.cat([self.given, self.given]), torch.cat([self.kept, torch.zeros_like(self.kept)]))

    def or_zero(self, tensor: Tensor) -> Tensor:
        """Return `tensor` with zeros in the rows that are absent."""
        return torch.where(self.kept.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0.0)


class ImageCondition(nn.Module):
    """Convolutions that bring a condition image to the size of the latents."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        halvings = stride.bit_length() - 1
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.halving = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(halvings))
        self.last = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Return the condition in the size of the latents, with `width` channels."""
        x = F.silu(self.first(image))
        for convolution in self.halving:
            x = F.silu(convolution(x))
        out: Tensor = self.last(x)
        return out


MOST_OF_A_HEAD = 32
"""The most channels of an attention head."""


@dataclass(frozen=True)
class ConditionSpec:
    """The kind of condition a denoiser takes, and its size."""

    kind: str = "none"
    """none, class, image or embedding."""
    classes: int = 0
    channels: int = 0
    """Channels of a condition image."""
    width: int = 0
    """Width of an embedding's tokens."""

    @property
    def embeds(self) -> int | None:
        """Return the number of class embeddings: one per class, and a last one for no class."""
        return self.classes + 1 if self.kind == "class" else None


def build_denoiser(options: Any, latents: int, size: int, asked: ConditionSpec) -> nn.Module:
    """Return a denoiser for latents with `latents` channels and `size` positions per side."""
    extra = options.condition_width if asked.kind == "image" else 0
    widths = list(options.widths)
    shared = {
        "sample_size": size,
        "in_channels": latents + extra,
        "out_channels": latents,
        "block_out_channels": widths,
        "layers_per_block": options.layers,
        "norm_num_groups": choose_norm_groups(widths),
    }
    if asked.kind == "embedding":
        return _build_cross_attention_unet(shared, options, asked.width)
    return _build_unconditional_unet(shared, options, asked.embeds)


def check_denoiser(denoiser: nn.Module, folder: str, options: Any, latents: int, asked: ConditionSpec) -> None:
    """Raise `BadRecipe` for a pretrained denoiser that was built for other latents or conditions."""
    config: Any = denoiser.config
    extra = options.condition_width if asked.kind == "image" else 0
    wanted: dict[str, object] = {"in_channels": latents + extra, "out_channels": latents}
    if asked.kind == "embedding":
        wanted |= {"cross_attention_dim": asked.width, "num_class_embeds": None, "addition_embed_type": None}
    else:
        wanted["num_class_embeds"] = asked.embeds
    wanted["class_embed_type"] = None
    wrong = [f"{name}={config.get(name)}" for name, value in wanted.items() if config.get(name) != value]
    if isinstance(denoiser, UNet2DConditionModel) != (asked.kind == "embedding"):
        wrong.insert(0, f"a {type(denoiser).__name__}")
    if wrong:
        raise BadRecipe(
            f"model.denoiser={folder} has {', '.join(wrong)}",
            allowed=f"for model.condition={asked.kind}: " + ", ".join(f"{k}={v}" for k, v in wanted.items()),
            do="change model.condition, or write model.denoiser=new",
        )


def _build_unconditional_unet(shared: Mapping[str, object], options: Any, embeds: int | None) -> nn.Module:
    model: nn.Module = UNet2DModel(
        **shared,
        **_list_block_types("DownBlock2D", "AttnDownBlock2D", "AttnUpBlock2D", "UpBlock2D", options),
        attention_head_dim=_choose_head_width(options.widths),
        add_attention=options.attention_levels > 0,
        num_class_embeds=embeds,
    )
    return model


def _build_cross_attention_unet(shared: Mapping[str, object], options: Any, width: int) -> nn.Module:
    head = _choose_head_width(options.widths)
    model: nn.Module = UNet2DConditionModel(
        **shared,
        **_list_block_types("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D", options),
        # In UNet2DConditionModel this argument is the number of heads, despite its name.
        attention_head_dim=[channels // head for channels in options.widths],
        cross_attention_dim=width,
    )
    return model


def _list_block_types(down: str, attentive_down: str, attentive_up: str, up: str, options: Any) -> dict[str, list[str]]:
    """Return the block types of the levels; the lowest `attention_levels` have attention."""
    below = options.attention_levels
    above = len(options.widths) - below
    return {
        "down_block_types": [down] * above + [attentive_down] * below,
        "up_block_types": [attentive_up] * below + [up] * above,
    }


def _choose_head_width(widths: list[int]) -> int:
    return math.gcd(*widths, MOST_OF_A_HEAD)


Draw = Callable[[Tensor], Tensor]
"""A function that returns random numbers in the shape of a tensor."""
MOMENTUM = 0.02
"""The weight of one batch in the running scale while the autoencoder is trained."""


class LatentDiffusion(nn.Module):
    """Autoencoder and denoiser: images to latents, denoising of latents, latents to images.

    Latents are fp32, multiplied by `latent_scale` to have the variance of the noise. Without an autoencoder they are
    the pixels. A frozen autoencoder stays in eval mode after `train()`.
    """

    latent_scale: Tensor
    """0 until it is measured; 0 is used as 1."""

    def __init__(
        self,
        autoencoder: AutoencoderKL | None,
        denoiser: nn.Module | None,
        noise: NoiseSchedule,
        asked: ConditionSpec,
        condition: ImageCondition | None = None,
    ) -> None:
        super().__init__()
        self.autoencoder, self.denoiser, self.noise, self.condition = autoencoder, denoiser, noise, condition
        self.asked = asked
        self.frozen = self.measures_scale = False
        self.register_buffer("latent_scale", torch.zeros(()))

    def freeze_autoencoder(self) -> None:
        """Exclude the autoencoder from training, and put it in eval mode."""
        self.frozen = True
        if self.autoencoder is not None:
            self.autoencoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> LatentDiffusion:
        """Set the mode of all parts; a frozen autoencoder stays in eval mode."""
        # nn.Module.train() reaches all submodules, the frozen autoencoder as well.
        super().train(mode)
        if self.frozen and self.autoencoder is not None:
            self.autoencoder.eval()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the parts: `forward` of the whole is never called, so compiling it would do nothing."""
        vae = self.autoencoder
        parts = [self.denoiser, self.condition, *([vae.encoder, vae.decoder] if vae is not None else [])]
        for part in parts:
            if part is not None:
                part.compile(*args, **kwargs)

    def moments(self, images: Tensor) -> Tensor:
        """Return the mean and log variance of each image's latents, unscaled."""
        assert self.autoencoder is not None
        return widen(self.autoencoder.encode(images).latent_dist.parameters)

    def latents(self, moments: Tensor, draw: Draw = torch.randn_like) -> Tensor:
        """Sample scaled latents from their moments; with `torch.zeros_like` as `draw`, return their mean."""
        mean, spread = split_moments(widen(moments))
        latents = mean + (0.5 * spread).exp() * draw(mean)
        if self.measures_scale and self.training:
            self._update_latent_scale(latents.detach())
        return latents * self._scale()

    def pixels(self, latents: Tensor) -> Tensor:
        """Decode latents to images, roughly in -1..1."""
        if self.autoencoder is None:
            return latents
        return widen(self.autoencoder.decode(latents / self._scale()).sample)

    def denoise(self, noisy: Tensor, timesteps: Tensor, condition: Condition | None) -> Tensor:
        """Return the denoiser's output; `timesteps` stay integers until they are embedded."""
        assert self.denoiser is not None
        if condition is None:
            return self._said(noisy, timesteps)
        if self.asked.kind == "class":
            absent = torch.full_like(condition.given, self.asked.classes)
            # torch.where keeps the selection on the device; indexing by a mask would wait for it.
            return self._said(noisy, timesteps, class_labels=torch.where(condition.kept, condition.given, absent))
        if self.asked.kind == "embedding":
            return self._said(noisy, timesteps, encoder_hidden_states=condition.or_zero(condition.given))
        assert self.condition is not None
        seen = condition.or_zero(widen(self.condition(condition.given)))
        return self._said(torch.cat([noisy, seen], dim=1), timesteps)

    def latent_shape(self, images: int, channels: int, size: int) -> tuple[int, int, int, int]:
        """Return the shape of the latents of a batch of images."""
        if self.autoencoder is None:
            return images, channels, size, size
        config = self.autoencoder.config
        side = size // compute_latent_stride(config)
        return images, config["latent_channels"], side, side

    def _said(self, noisy: Tensor, timesteps: Tensor, **how: Tensor) -> Tensor:
        assert self.denoiser is not None
        said: Tensor = self.denoiser(noisy, timesteps, **how).sample
        return said

    def _scale(self) -> Tensor:
        # A new tensor: autograd saves it for backward, and `_update_latent_scale` changes the buffer in place.
        return torch.where(self.latent_scale > 0.0, self.latent_scale, 1.0)

    @torch.no_grad()
    def _update_latent_scale(self, latents: Tensor) -> None:
        # Constant latents have no spread.
        now = 1.0 / latents.std().clamp(min=1e-6)
        moved = self.latent_scale.lerp(now, MOMENTUM)
        # The first batch sets the scale; torch.where avoids a device synchronization.
        self.latent_scale.copy_(torch.where(self.latent_scale > 0.0, moved, now))
