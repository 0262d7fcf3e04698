"""Where the autoencoder and the denoiser of a run come from: new, a folder, or what a run remembers of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

from halfstep.tasks.models.latent.autoencoder import autoencoder_config, autoencoder_from
from halfstep.tasks.models.latent.denoiser import Asked, check_denoiser, new_denoiser
from halfstep.tasks.models.latent.going_on import ORIGIN, begun, own_autoencoder
from halfstep.tasks.models.latent.kept import AUTOENCODER, kept_denoiser, plain_config

DENOISER = "denoiser"
KINDS = ("UNet2DModel", "UNet2DConditionModel")


class Origins:
    """Makes the parts of a model; a run that is finished, or goes on, makes them without the folders they came from."""

    def __init__(self, options: Any, data: Any, folder: str | None = None) -> None:
        """`folder` is the run's own, where it may have been interrupted."""
        self._options, self._data = options, data
        self._begun = begun(folder)
        self._autoencoder: dict[str, Any] | None = None
        self._origin: dict[str, Any] | None = None
        self._denoiser: dict[str, Any] | None = None
        # A denoiser's weights come with the checkpoint; what it is built of is all that must be known before.
        self._known: Mapping[str, Any] = self._begun.facts if self._begun is not None else {}
        self._finished = False
        self.notes: list[str] = []
        """What a person should know about where a part came from."""

    def facts(self) -> dict[str, Any]:
        """What it takes to make the same parts again, as plain data."""
        options = self._options
        if self._autoencoder is None and options.autoencoder not in ("new", "none"):
            self.autoencoder()
        if self._denoiser is None and options.stage != "autoencoder" and options.denoiser != "new":
            self._kept_denoiser()
        autoencoder = self._new() if options.autoencoder == "new" else self._autoencoder
        found = {AUTOENCODER: autoencoder, ORIGIN: self._origin, DENOISER: self._denoiser}
        return {name: config for name, config in found.items() if config is not None}

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Weights come from the run's own file, which holds those of the frozen parts too."""
        self._autoencoder, self._origin = facts.get(AUTOENCODER), facts.get(ORIGIN)
        self._denoiser, self._known = facts.get(DENOISER), facts
        self._finished = bool(facts)

    def autoencoder(self) -> tuple[AutoencoderKL | None, float | None]:
        """The module, and the scale of its latents where it was published with one."""
        where = self._options.autoencoder
        if where == "none":
            return None, None
        if where == "new":
            return autoencoder_from(self._new()), None
        if self._finished and self._autoencoder is not None:
            return autoencoder_from(self._autoencoder), (self._origin or {}).get("scale")
        kept, self.notes = own_autoencoder(where, self._begun)
        self._autoencoder, self._origin = kept.config, {"digest": kept.digest, "scale": kept.scale}
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
        known = self._known.get(DENOISER)
        if isinstance(known, dict) and known.get("kind") in KINDS:
            self._denoiser = known
            config = {name: value for name, value in known.items() if name != "kind"}
            module: nn.Module = getattr(diffusers, known["kind"])(**config)
            return module
        denoiser = kept_denoiser(self._options.denoiser)
        self._denoiser = {"kind": type(denoiser).__name__, **plain_config(denoiser)}
        return denoiser
