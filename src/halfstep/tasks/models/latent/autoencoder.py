"""The autoencoder between images and latents: diffusers' AutoencoderKL, in the sizes of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

CHANNELS_A_GROUP = 4
"""At least so many are normalised together, where widths allow it: one alone would lose its mean."""
MOST_GROUPS = 32


def autoencoder_config(options: Any, channels: int, size: int) -> dict[str, Any]:
    """A new autoencoder as plain data, which `AutoencoderKL(**config)` builds."""
    widths = list(options.autoencoder_widths)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "block_out_channels": widths,
        "layers_per_block": options.autoencoder_layers,
        "latent_channels": options.latent_channels,
        "norm_num_groups": norm_groups(widths),
        "sample_size": size,
    }


def autoencoder_from(config: Mapping[str, Any]) -> AutoencoderKL:
    """With random weights."""
    module: AutoencoderKL = AutoencoderKL(**config)
    return module


def norm_groups(widths: Sequence[int]) -> int:
    """The most groups that divide all widths and leave each group some channels."""
    common = math.gcd(*widths)
    most = max(1, min(MOST_GROUPS, common // CHANNELS_A_GROUP))
    return max(groups for groups in range(1, most + 1) if common % groups == 0)


def stride_of(config: Mapping[str, Any]) -> int:
    """How many pixels, across, become one place of the latents."""
    return int(2 ** (len(config["block_out_channels"]) - 1))
