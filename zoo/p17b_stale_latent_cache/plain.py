"""Latents that are kept beside their images and found again by name, as scripts that cache them do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.outcome import Outcome
from zoo.p17_fp32_module_inside_autocast.plain import autoencoder

IMAGES = 4


def images() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(3, 16, 16) * 2 - 1 for _ in range(IMAGES)]


def first() -> AutoencoderKL:
    torch.manual_seed(1)
    return autoencoder()


def another() -> AutoencoderKL:
    torch.manual_seed(2)
    return autoencoder()


@torch.no_grad()
def in_fp32(vae: AutoencoderKL, batch: Tensor) -> Tensor:
    moments: Tensor = vae.encode(batch).latent_dist.parameters
    return moments.float()


def in_fp16(vae: AutoencoderKL, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return in_fp32(vae, batch)


def run() -> Outcome:
    right = _encoded(lambda batch: in_fp32(another(), batch))
    with tempfile.TemporaryDirectory() as folder:
        _kept(Path(folder), lambda batch: in_fp16(first(), batch))
        after_nan = _kept(Path(folder), lambda batch: in_fp32(first(), batch))
    with tempfile.TemporaryDirectory() as folder:
        _kept(Path(folder), lambda batch: in_fp32(first(), batch))
        after_another = _kept(Path(folder), lambda batch: in_fp32(another(), batch))
    spoilt = sum(not bool(latents.isfinite().all()) for latents in after_nan)
    apart = (torch.stack(after_another) - right).norm() / right.norm()
    return Outcome(
        good=not spoilt and bool(apart < 0.01),
        seen=f"after a run in fp16, {spoilt} of {IMAGES} images have latents that are not finite in a run in fp32; "
        f"with another autoencoder they are those of the first, {apart:.0%} away",
    )


def _encoded(encode: Callable[[Tensor], Tensor]) -> Tensor:
    return encode(torch.stack(images()))


def _kept(folder: Path, encode: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Encode what has no file yet; read the rest."""
    found = []
    for number, image in enumerate(images()):
        file = folder / f"{number}.safetensors"
        if not file.exists():
            save_file({"moments": encode(image[None])[0]}, file)
        found.append(load_file(file)["moments"])
    return found
