"""Reject diffusion recipes whose settings exclude each other."""

from __future__ import annotations

from typing import Any

from halfstep.errors import BadRecipe

FINE = 8
"""DDIM steps that span at least this many timesteps may be uneven: rounding to whole timesteps no longer matters."""


def check(recipe: Any) -> None:
    """Raise `BadRecipe` for impossible settings before anything is read."""
    options, data = recipe.model, recipe.data
    _check_stage(options)
    if options.stage == "autoencoder":
        return
    if options.denoiser == "new" and options.attention_levels > len(options.widths):
        raise BadRecipe(
            f"model.attention_levels={options.attention_levels} with {len(options.widths)} levels in model.widths",
            allowed="at most as many as there are levels",
            do=f"write model.attention_levels={len(options.widths)}",
        )
    if options.autoencoder in ("new", "none"):
        halvings = len(options.autoencoder_widths) - 1 if options.autoencoder == "new" else 0
        halvings += len(options.widths) - 1 if options.denoiser == "new" else 0
        check_image_size(data, 2**halvings)
    _check_guidance(options)
    _check_steps(options)


def check_image_size(data: Any, halves: int) -> None:
    """Raise `BadRecipe` if the image size is no multiple of `halves`, the model's total stride."""
    if data.size % halves:
        often = "once" if halves == 2 else f"{halves.bit_length() - 1} times"
        raise BadRecipe(
            f"data.size={data.size}, which the model halves {often}",
            allowed=f"multiples of {halves}",
            do=f"write data.size={-(-data.size // halves) * halves}, or fewer levels",
        )


def check_image_channels(given: int, wanted: int, whose: str) -> None:
    """Raise `BadRecipe` where images do not have the channels a pretrained autoencoder was built for."""
    if given != wanted:
        raise BadRecipe(
            f"data.channels={given} with model.autoencoder={whose}",
            allowed=f"images of {wanted} channels, for which it was made",
            do=f"write data.channels={wanted}",
        )


def _check_stage(options: Any) -> None:
    if options.stage == "denoiser" and options.autoencoder == "new":
        raise BadRecipe(
            "model.stage=denoiser with model.autoencoder=new, which is untrained and would stay so",
            allowed="an autoencoder that was trained, both at once, or none",
            do="train one first (model.stage=autoencoder), then write model.autoencoder=runs/NAME; "
            "or model.stage=both; or model.autoencoder=none",
        )
    if options.stage != "denoiser" and options.autoencoder == "none":
        raise BadRecipe(
            f"model.stage={options.stage} with model.autoencoder=none",
            allowed="an autoencoder to train",
            do="write model.autoencoder=new, or model.stage=denoiser",
        )


def _check_guidance(options: Any) -> None:
    learnt = options.condition == "none" or options.denoiser != "new" or options.condition_drop > 0.0
    if options.guidance != 1.0 and not learnt:
        raise BadRecipe(
            f"model.guidance={options.guidance:g} with model.condition_drop=0: the denoiser always has a condition, "
            "so it never learns to predict without one",
            allowed="model.guidance=1, or a share of the samples without their condition",
            do="write model.guidance=1, or train with model.condition_drop=0.1",
        )


def _check_steps(options: Any) -> None:
    steps, of = options.sample_steps, options.timesteps
    if steps > of:
        raise BadRecipe(
            f"model.sample_steps={steps} with model.timesteps={of}",
            allowed="at most as many steps as there are timesteps",
            do=f"write model.sample_steps={of}",
        )
    if options.sampler == "ddim" and of % steps and of // steps < FINE:
        fitting = max(count for count in range(1, steps + 1) if of % count == 0)
        raise BadRecipe(
            f"model.sample_steps={steps} with model.timesteps={of}, which ddim cannot space evenly",
            allowed=f"a divisor of {of}, or at most {of // FINE}",
            do=f"write model.sample_steps={fitting}, or model.sampler=ddpm",
        )
