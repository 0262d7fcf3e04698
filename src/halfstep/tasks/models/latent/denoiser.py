"""The denoiser: a UNet of diffusers, plain or with attention to the tokens of an embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn

from halfstep.errors import BadRecipe
from halfstep.tasks.models.latent.autoencoder import norm_groups

MOST_OF_A_HEAD = 32
"""Channels of a head of attention."""


@dataclass(frozen=True)
class Asked:
    """What a denoiser is asked with, and how large that is."""

    kind: str = "none"
    """none, class, image or embedding."""
    classes: int = 0
    channels: int = 0
    """Of a condition image."""
    width: int = 0
    """Of an embedding's tokens."""

    @property
    def embeds(self) -> int | None:
        """Classes that a denoiser tells apart: those of the data, and the last one for no class."""
        return self.classes + 1 if self.kind == "class" else None


def new_denoiser(options: Any, latents: int, size: int, asked: Asked) -> nn.Module:
    """For latents of so many channels and such a size."""
    extra = options.condition_width if asked.kind == "image" else 0
    widths = list(options.widths)
    shared = {
        "sample_size": size,
        "in_channels": latents + extra,
        "out_channels": latents,
        "block_out_channels": widths,
        "layers_per_block": options.layers,
        "norm_num_groups": norm_groups(widths),
    }
    if asked.kind == "embedding":
        return _attentive(shared, options, asked.width)
    return _plain(shared, options, asked.embeds)


def check_denoiser(denoiser: nn.Module, folder: str, options: Any, latents: int, asked: Asked) -> None:
    """Refuse a denoiser from a folder that was made for other latents or conditions."""
    config: Any = denoiser.config
    extra = options.condition_width if asked.kind == "image" else 0
    wanted: dict[str, Any] = {"in_channels": latents + extra, "out_channels": latents}
    if asked.kind == "embedding":
        wanted |= {"cross_attention_dim": asked.width, "num_class_embeds": None, "addition_embed_type": None}
    else:
        wanted["num_class_embeds"] = asked.embeds
    wanted["class_embed_type"] = None
    wrong = _differences(config, wanted)
    if isinstance(denoiser, UNet2DConditionModel) != (asked.kind == "embedding"):
        wrong.insert(0, f"a {type(denoiser).__name__}")
    if wrong:
        raise BadRecipe(
            f"model.denoiser={folder} has {', '.join(wrong)}",
            allowed=f"for model.condition={asked.kind}: " + ", ".join(f"{k}={v}" for k, v in wanted.items()),
            do="change model.condition, or write model.denoiser=new",
        )


def _differences(config: Any, wanted: Mapping[str, Any]) -> list[str]:
    return [f"{name}={config.get(name)}" for name, value in wanted.items() if config.get(name) != value]


def _plain(shared: Mapping[str, Any], options: Any, embeds: int | None) -> nn.Module:
    model: nn.Module = UNet2DModel(
        **shared,
        **_blocks("DownBlock2D", "AttnDownBlock2D", "AttnUpBlock2D", "UpBlock2D", options),
        attention_head_dim=_head(options.widths),
        add_attention=options.attention_levels > 0,
        num_class_embeds=embeds,
    )
    return model


def _attentive(shared: Mapping[str, Any], options: Any, width: int) -> nn.Module:
    head = _head(options.widths)
    model: nn.Module = UNet2DConditionModel(
        **shared,
        **_blocks("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D", options),
        # What diffusers calls so here is the number of heads.
        attention_head_dim=[channels // head for channels in options.widths],
        cross_attention_dim=width,
    )
    return model


def _blocks(down: str, attentive_down: str, attentive_up: str, up: str, options: Any) -> dict[str, list[str]]:
    """The kinds of the levels, of which the lowest have attention."""
    below = options.attention_levels
    above = len(options.widths) - below
    return {
        "down_block_types": [down] * above + [attentive_down] * below,
        "up_block_types": [attentive_up] * below + [up] * above,
    }


def _head(widths: list[int]) -> int:
    return math.gcd(*widths, MOST_OF_A_HEAD)
