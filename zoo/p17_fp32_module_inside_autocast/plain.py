"""A latent diffusion step with diffusers' own autoencoder, which is kept in fp32, or so it says."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DModel
from torch import Tensor, nn

from zoo.outcome import Outcome

GAIN = 1e5
"""What the first convolution is scaled up by."""
SMALL: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def autoencoder() -> AutoencoderKL:
    """Its activations do not fit fp16, as those of some released ones do not."""
    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    vae = AutoencoderKL(**blocks, **SMALL).requires_grad_(False)
    vae.encoder.conv_in.weight.mul_(GAIN)
    return vae


class LatentDiffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vae = autoencoder()
        blocks: dict[str, Any] = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        self.unet = UNet2DModel(in_channels=4, out_channels=4, **blocks, **SMALL)


def loss_fn(model: LatentDiffusion, images: Tensor) -> Tensor:
    latents = model.vae.encode(images).latent_dist.sample() * model.vae.config.scaling_factor
    noise = torch.randn_like(latents)
    timesteps = torch.randint(1000, (len(images),))
    return nn.functional.mse_loss(model.unet(latents + noise, timesteps).sample.float(), noise.float())


def images() -> Tensor:
    return torch.rand(2, 3, 16, 16) * 2 - 1


def run() -> Outcome:
    torch.manual_seed(0)
    model = LatentDiffusion()
    model.vae.to(torch.float32)
    with torch.no_grad():
        right = model.vae.encode(images()).latent_dist.mean
        with torch.autocast("cpu", dtype=torch.float16):
            latents = model.vae.encode(images()).latent_dist.mean
            loss = loss_fn(model, images())
    return Outcome(
        good=bool(loss.isfinite()),
        seen=f"latents in {str(latents.dtype).removeprefix('torch.')}, {_finite(latents)} of them finite "
        f"(without autocast {_finite(right)}), loss {loss.item():.2f}",
    )


def _finite(latents: Tensor) -> str:
    return f"{latents.isfinite().float().mean().item():.0%}"
