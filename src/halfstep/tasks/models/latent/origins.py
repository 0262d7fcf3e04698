"""Where the autoencoder and the denoiser of a run come from: new, a folder, or what a finished run remembers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

from halfstep.tasks.models.latent.autoencoder import autoencoder_config, autoencoder_from
from halfstep.tasks.models.latent.denoiser import Asked, check_denoiser, new_denoiser
from halfstep.tasks.models.latent.kept import kept_autoencoder, kept_denoiser, plain_config

KINDS = ("UNet2DModel", "UNet2DConditionModel")


class Origins:
    """Makes the parts of a model; a finished run makes them without the folders that they once came from."""

    def __init__(self, options: Any, data: Any) -> None:
        self._options, self._data = options, data
        self._autoencoder: dict[str, Any] | None = None
        self._denoiser: dict[str, Any] | None = None
        self._finished = False

    def facts(self) -> dict[str, Any]:
        """What it takes to make the same parts again, as plain data."""
        options = self._options
        if self._autoencoder is None and options.autoencoder not in ("new", "none"):
            self.autoencoder()
        if self._denoiser is None and options.stage != "autoencoder" and options.denoiser != "new":
            self._kept_denoiser()
        autoencoder = self._new() if options.autoencoder == "new" else self._autoencoder
        found = {"autoencoder": autoencoder, "denoiser": self._denoiser}
        return {name: config for name, config in found.items() if config is not None}

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Weights come from the run's own file, which holds those of the frozen parts too."""
        self._autoencoder, self._denoiser = facts.get("autoencoder"), facts.get("denoiser")
        self._finished = bool(facts)

    def autoencoder(self) -> tuple[AutoencoderKL | None, float | None]:
        """The module, and the scale of its latents where it was published with one."""
        where = self._options.autoencoder
        if where == "none":
            return None, None
        if where == "new":
            return autoencoder_from(self._new()), None
        if self._finished and self._autoencoder is not None:
            return autoencoder_from(self._autoencoder), None
        kept = kept_autoencoder(where)
        self._autoencoder = kept.config
        return kept.module, kept.scale

    def denoiser(self, latents: int, size: int, asked: Asked) -> nn.Module | None:
        """For latents of so many channels and such a size."""
        options = self._options
        if options.stage == "autoencoder":
            return None
        if options.denoiser == "new":
            return new_denoiser(options, latents, size, asked)
        denoiser = self._kept_denoiser()
        check_denoiser(denoiser, options.denoiser, options, latents, asked)
        return denoiser

    def _new(self) -> dict[str, Any]:
        return autoencoder_config(self._options, self._data.channels, self._data.size)

    def _kept_denoiser(self) -> nn.Module:
        if self._finished and self._denoiser is not None and self._denoiser.get("kind") in KINDS:
            config = {name: value for name, value in self._denoiser.items() if name != "kind"}
            module: nn.Module = getattr(diffusers, self._denoiser["kind"])(**config)
            return module
        denoiser = kept_denoiser(self._options.denoiser)
        self._denoiser = {"kind": type(denoiser).__name__, **plain_config(denoiser)}
        return denoiser
