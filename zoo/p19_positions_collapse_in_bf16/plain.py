"""diffusers' own UNet, given its timesteps in the dtype of everything else, as `.to(weight_dtype)` does."""

from __future__ import annotations

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn

from zoo.outcome import Outcome

TIMESTEPS = 1000


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            in_channels=1,
            out_channels=1,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D",) * 2,
            up_block_types=("UpBlock2D",) * 2,
        )

    def forward(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        return self.unet(noisy, timesteps).sample  # type: ignore[no-any-return]


def model() -> Denoiser:
    torch.manual_seed(0)
    return Denoiser()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(TIMESTEPS, 1, 4, 4), torch.arange(TIMESTEPS)


def cast_loss(net: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    noisy, timesteps = given
    return net(noisy, timesteps.to(torch.bfloat16)).float().square().mean()  # type: ignore[no-any-return]


def distinct(embeddings: Tensor) -> int:
    return len(embeddings.detach().float().unique(dim=0))


def run() -> Outcome:
    net, seen = model(), []
    net.unet.time_proj.register_forward_hook(lambda module, given, out: seen.append(distinct(out)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cast_loss(net, batch())
    return Outcome(
        good=seen == [TIMESTEPS],
        seen=f"{TIMESTEPS} timesteps become {seen[0]} different embeddings; the loss is {loss.item():.2f}, nothing is "
        "NaN, and nothing is said",
    )
