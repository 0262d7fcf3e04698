"""An autoencoder whose activations overflow fp16, under a denoiser in fp16: without its island, and with it.

    python benchmarks/latent_overflow.py [--steps 60] [--json] [--record]

A small AutoencoderKL learns drawn shapes in fp32. Then the activations of its encoder are scaled up, layer by layer
and without any change of what it computes (its last normalization takes the scale out again), until fp16 cannot hold
them: as it is with autoencoders that people download. It is saved as a diffusers folder, and a denoiser trains on its
latents in fp16 three times: with the autoencoder forced into fp16 under `guard: watch`, the same under `guard: repair`,
and as the recipe has it, where a frozen autoencoder is an island.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn

import halfstep
from halfstep.errors import Diverged
from halfstep.files import read_json
from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.models.latent.pretrained import load_pretrained_autoencoder

RECORD = Path(__file__).with_suffix(".json")
SMALL = [
    "data.name=shapes",
    "data.size=16",
    "data.samples=80",
    "train.batch_size=8",
    "train.num_workers=0",
    "train.seed=0",
    "run.pictures=0",
    "model.autoencoder_widths=[8,16]",
    "model.widths=[8,16]",
    "model.layers=1",
    "model.attention_levels=0",
]


@torch.no_grad()
def scaled_up(autoencoder: AutoencoderKL, times: float) -> None:
    """Multiply every activation on the encoder's main path, up to the normalization that takes the factor out again.

    Blocks add to the path: what they add is multiplied. Layers that lie in the path see what is multiplied already:
    only their biases are.
    """
    encoder = autoencoder.encoder
    _multiply(encoder.conv_in, times)
    resnets = [module for module in encoder.modules() if type(module).__name__ == "ResnetBlock2D"]
    for block in resnets:
        _multiply(block.conv2, times)
        if block.conv_shortcut is not None and block.conv_shortcut.bias is not None:
            block.conv_shortcut.bias.mul_(times)
    for module in encoder.modules():
        if type(module).__name__ == "Downsample2D":
            module.conv.bias.mul_(times)
        if type(module).__name__ == "Attention":
            _multiply(module.to_out[0], times)


def _multiply(layer: nn.Module, times: float) -> None:
    for parameter in layer.parameters():
        parameter.mul_(times)


@torch.no_grad()
def overflows(autoencoder: AutoencoderKL, images: torch.Tensor) -> bool:
    with resolve_precision_name("fp16").autocast(images.device):
        return not autoencoder.encode(images).latent_dist.parameters.isfinite().all().item()


@torch.no_grad()
def large(autoencoder: AutoencoderKL) -> tuple[AutoencoderKL, float, float]:
    """The same function with activations beyond fp16: itself, by how much they grew, and how far it is from before."""
    images = torch.rand(8, autoencoder.config.in_channels, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    before, times = autoencoder.encode(images).latent_dist.mean, 1.0
    while not overflows(autoencoder, images):
        scaled_up(autoencoder, 4.0)
        times *= 4.0
    scaled_up(autoencoder, 4.0)  # beyond doubt, on other images too
    after = autoencoder.encode(images).latent_dist.mean
    return autoencoder, times * 4.0, ((after - before).norm() / before.norm()).item()


def autoencoder_folder(root: Path) -> tuple[Path, dict[str, float]]:
    run = halfstep.fit(
        "diffusion_tiny",
        precision="fp32",
        settings=[
            *SMALL,
            "model.stage=autoencoder",
            "model.autoencoder=new",
            "model.condition=none",
            "train.epochs=8",
            f"run.dir={root}/first",
        ],
        quiet=True,
    )
    module, times, apart = large(load_pretrained_autoencoder(str(run.dir)).module)
    folder = root / "vae"
    module.save_pretrained(folder)
    return folder, {"activations_times": times, "latents_apart": apart}


def denoised(root: Path, name: str, autoencoder: Path, steps: int, *settings: str) -> dict[str, Any]:
    """How a run in fp16 ended, and what its guard said."""
    folder = root / name
    given = [*SMALL, "model.stage=denoiser", f"model.autoencoder={autoencoder}", "data.cache_latents=false"]
    given += [f"train.steps={steps}", "train.epochs=null", f"run.dir={folder}", *settings]
    try:
        run = halfstep.fit("diffusion_tiny", precision="fp16", settings=given, quiet=True)
    except Diverged as error:
        return {"ended": "diverged", "said": error.given, "do": error.do}
    result = read_json(folder / "result.json") or {}
    loss = run.metrics["loss"]
    ended = "trained" if run.reason == "finished" and math.isfinite(loss) else run.reason
    return {
        "ended": ended,
        "loss": loss,
        "skipped": run.skipped,
        "remedies": result.get("remedies"),
        "steps": run.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    logging.getLogger("halfstep").setLevel(logging.ERROR)  # fp16 is slow here, and wanted
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder, made = autoencoder_folder(root)
        forced = "model.autoencoder_island=never"
        found = {
            **made,
            "without": denoised(root, "without", folder, given.steps, forced, "guard.mode=watch"),
            "repaired": denoised(root, "repaired", folder, given.steps, forced, "guard.mode=repair"),
            "with": denoised(root, "with", folder, given.steps),
        }
    if given.record:
        RECORD.write_text(json.dumps({"command": "python benchmarks/latent_overflow.py", **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if not given.json:
        print(
            f"without={found['without']['ended']} repaired={found['repaired']['ended']} with={found['with']['ended']} "
            f"activations_times={made['activations_times']:.0f}"
        )


if __name__ == "__main__":
    main()
