"""A latent diffusion step whose VAE is kept in fp32, or so it says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


class Vae(nn.Module):
    """Its activations do not fit fp16, as those of some released ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.constant_(self.up.weight, 1e5)
        nn.init.constant_(self.down.weight, 1e-6)

    def encode(self, images: Tensor) -> Tensor:
        return self.down(self.up(images))


class LatentDiffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vae = Vae().requires_grad_(False)
        self.unet = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def loss_fn(model: nn.Module, images: Tensor) -> Tensor:
    latents = model.vae.encode(images)
    noise = torch.randn_like(latents)
    return nn.functional.mse_loss(model.unet(latents + noise).float(), noise.float())


def run() -> Outcome:
    torch.manual_seed(0)
    model = LatentDiffusion()
    model.vae.to(torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        latents = model.vae.encode(torch.rand(8, 16))
        loss = loss_fn(model, torch.rand(8, 16))
    return Outcome(
        good=bool(loss.isfinite()),
        seen=f"latents in {str(latents.dtype).removeprefix('torch.')}, "
        f"{latents.isfinite().float().mean().item():.0%} of them finite, loss {loss.item():.2f}",
    )
