"""Load pretrained autoencoders and denoisers from a run or a local diffusers folder.

Nothing is downloaded or unpickled: weights are read from .safetensors files only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors import SafetensorError
from torch import nn

from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.errors import BadData, HalfstepError, StateMismatch, Unsafe, advise_new_run, format_error_line
from halfstep.files import read_json
from halfstep.precision.island import island
from halfstep.recipe.resolve import validate_against_schema
from halfstep.recipe.sources import read_recipe
from halfstep.tasks.models.latent.checks import check_image_channels, check_image_size
from halfstep.tasks.models.latent.model import (
    ConditionSpec,
    ImageCondition,
    LatentDiffusion,
    build_autoencoder,
    build_autoencoder_config,
    build_denoiser,
    check_denoiser,
    compute_latent_stride,
)
from halfstep.tasks.models.latent.noise import NoiseSchedule
from halfstep.tasks.options.diffusion import SCHEMA
from halfstep.train.outputs import BEST, FACTS, LAST
from halfstep.train.run_folder import RECIPE, find_recipe_file
from halfstep.train.state import State
from halfstep.train.weights import compute_weights_digest, has_finite_weights, load_weights

AUTOENCODER = "autoencoder"
"""The name of the autoencoder in a run's model, and of its config in the run's facts."""
CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
"""Lists the weight files of a sharded model."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MOST_LAYERS, MOST_LEVELS = 64, 64
"""Limits of a network described by a config: building it takes time before its size is known."""
MOVED = ("shift_factor", "latents_mean", "latents_std")
"""Config entries of latents that are shifted as well as scaled; these are not supported."""
TRAIN_ONE = "train one with model.stage=autoencoder, then write model.autoencoder=runs/NAME"
_AUTOENCODERS = {"AutoencoderKL": AutoencoderKL}
_DENOISERS = {"UNet2DModel": UNet2DModel, "UNet2DConditionModel": UNet2DConditionModel}


@dataclass(frozen=True)
class PretrainedAutoencoder:
    """An autoencoder with its trained weights."""

    module: AutoencoderKL
    scale: float | None
    """The factor of its latents; None if it is unknown and must be measured."""
    digest: str
    config: dict[str, object]
    """Plain data from which `AutoencoderKL(**config)` builds the same module."""


def load_pretrained_autoencoder(folder: str | Path) -> PretrainedAutoencoder:
    """Load an autoencoder from a run's folder, a diffusers folder, or a pipeline's folder with `vae` in it.

    Raise `BadData`, `Unsafe` or `StateMismatch` if there is none to be used.
    """
    place, scale = Path(os.path.expanduser(folder)), None
    module: AutoencoderKL
    if (place / RECIPE).is_file():
        module = _load_run_autoencoder(place)
    else:
        module, config = _load_diffusers_module(place, "vae", _AUTOENCODERS, TRAIN_ONE)
        scale = _read_scaling_factor(config, place)
    return PretrainedAutoencoder(module, scale, compute_weights_digest(module), extract_plain_config(module))


def load_pretrained_denoiser(folder: str | Path) -> nn.Module:
    """Load a denoiser from a diffusers folder, or from a pipeline's folder with `unet` in it.

    Raise `BadData` or `Unsafe` if there is none to be used.
    """
    do = "write model.denoiser=FOLDER with the folder that save_pretrained wrote, or model.denoiser=new"
    module: nn.Module = _load_diffusers_module(Path(os.path.expanduser(folder)), "unet", _DENOISERS, do)[0]
    return module


def extract_plain_config(module: Any) -> dict[str, object]:
    """Return the config of a diffusers module without private entries, for a JSON file."""
    return {name: value for name, value in dict(module.config).items() if not name.startswith("_")}


def _load_run_autoencoder(folder: Path) -> AutoencoderKL:
    _require_trained_autoencoder(folder)
    path = next((folder / name for name in (BEST, LAST) if (folder / name).is_file()), None)
    if path is None:
        raise BadData(
            f"{folder} contains no weights",
            allowed=f"a run with {BEST} or {LAST}",
            do="train the run to its first evaluation",
        )
    facts = read_json(folder / FACTS)
    config = facts.get(AUTOENCODER) if isinstance(facts, dict) else None
    sketch = _build_meta_module(AutoencoderKL, config, folder / FACTS, path.stat().st_size)
    module = sketch.to_empty(device=torch.get_default_device())
    # The file also holds the denoiser, which is not needed; the autoencoder must be complete.
    report = load_weights(nn.ModuleDict({AUTOENCODER: module}), path, partial=True)
    if report.missing or report.shapes:
        raise StateMismatch(
            f"{path} does not contain the autoencoder that {FACTS} describes\n{report}",
            allowed="the weights and the facts of one run",
            do="train the run again, or give the folder of another one",
        )
    built: AutoencoderKL = module.eval()
    return built


def _require_trained_autoencoder(folder: Path) -> None:
    """Raise `BadData` for a run of another task, or for one that only used an autoencoder."""
    raw = read_recipe(str(find_recipe_file(folder))).raw
    allowed = "a run of the task diffusion with model.stage autoencoder or both"
    if raw.get("task") != "diffusion":
        given = f"{folder} is a run of the task {raw.get('task')}, which trains no autoencoder"
        raise BadData(given, allowed=allowed, do=TRAIN_ONE)
    model = validate_against_schema(raw, SCHEMA, str(folder / RECIPE)).model
    if model.stage == "denoiser":
        used = model.autoencoder
        do = TRAIN_ONE if used in ("new", "none") else f"write model.autoencoder={used}, which that run used"
        raise BadData(f"{folder} trained a denoiser, and no autoencoder", allowed=allowed, do=do)


def _load_diffusers_module(
    folder: Path, part: str, kinds: Mapping[str, object], do: str
) -> tuple[Any, dict[str, object]]:
    """Return the module in a folder, or in the `part` of a pipeline, and its config as written there."""
    place = folder if (folder / CONFIG).is_file() else folder / part
    config = read_json(place / CONFIG)
    allowed = f"a local folder with {CONFIG} of {' or '.join(kinds)} and {WEIGHTS}"
    if not isinstance(config, dict):
        there = "" if folder.is_dir() else ": there is no such folder"
        raise BadData(f"no {' or '.join(kinds)} in {folder}{there}", allowed=allowed, do=do)
    name = str(config.get("_class_name"))
    if name not in kinds:
        raise BadData(f"{place} contains {name[:80]}", allowed=allowed, do=do)
    if config.get("quantization_config") is not None:
        raise BadData(f"{place} contains quantized weights", allowed=allowed, do="save it without quantization")
    size = sum((place / file).stat().st_size for file in _list_weight_files(place))
    _build_meta_module(kinds[name], config, place / CONFIG, size)
    return _load_checked_module(kinds[name], place), config


def _list_weight_files(place: Path) -> list[str]:
    """Return the names of the weight files; none may be a pickle or lie outside the folder.

    Raise `Unsafe` for a pickle or a path, `BadData` for missing files.
    """
    again = "save it again with diffusers: module.save_pretrained(FOLDER)"
    allowed = f"{WEIGHTS} in {place}"
    index = read_json(place / INDEX)
    files = index.get("weight_map") if isinstance(index, dict) else {"": WEIGHTS}
    names = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
    for name in names:
        # An index is data from elsewhere: it must not name a path outside its folder, nor a pickle.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise Unsafe(f"{place / INDEX} names the file {name[:80]!r}", allowed=allowed, do=again)
    if names and all((place / name).is_file() for name in names):
        return names
    pickles = sorted(file.name for file in place.iterdir() if file.suffix in PICKLES)
    if pickles:
        given = f"{place} contains {pickles[0]}, a pickle, which can run code when it is read"
        raise Unsafe(given, allowed=allowed, do=f"if you trust it, {again}")
    raise BadData(f"{place} lacks files of weights", allowed=allowed, do=again)


def _load_checked_module(kind: Any, place: Path) -> Any:
    try:
        module, info = kind.from_pretrained(
            str(place),
            # A folder that does not exist must not be taken for a repository on the hub.
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,  # True needs accelerate, and warns without it
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        raise _build_unreadable_error(place, format_error_line(error)) from error
    # diffusers silently initializes missing weights at random.
    lacking = [*info["missing_keys"], *info["mismatched_keys"], *info["error_msgs"]]
    if lacking:
        raise _build_unreadable_error(
            place, f"{len(lacking)} tensors are missing or of another shape, first {lacking[0]}"
        )
    if not has_finite_weights(module):
        raise BadData(
            f"{place} has weights that are not finite",
            allowed="finite weights",
            do="use weights from before they diverged",
        )
    return module


def _read_scaling_factor(config: Mapping[str, object], place: Path) -> float | None:
    """Return the scaling factor written in the config; None if there is none.

    The module's own attribute is not used: diffusers' default belongs to one particular autoencoder.
    """
    moved = [name for name in MOVED if config.get(name)]
    if moved:
        raise BadData(
            f"{place} has latents with a {moved[0]}",
            allowed="latents that are scaled, and not moved",
            do=f"use an autoencoder without {moved[0]}, or {TRAIN_ONE}",
        )
    scale = config.get("scaling_factor")
    if scale is None:
        return None
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        raise BadData(
            f"{place} has scaling_factor {str(scale)[:40]}",
            allowed="a finite number above 0",
            do=f"correct scaling_factor in {place}, or remove it: it is then measured",
        )
    return float(scale)


def _build_meta_module(kind: Any, config: Any, where: Path, size: int) -> Any:
    """Return the module on the meta device, after checking that `size` bytes of weights suffice for it.

    Nothing is allocated before that check, so a made-up config cannot exhaust memory.
    """
    if not isinstance(config, dict):
        raise _build_unreadable_error(where, f"it describes no {kind.__name__}")
    try:
        # Refuse a network with more blocks than any real one.
        levels = max((len(value) for value in config.values() if isinstance(value, list)), default=0)
        layers = max(
            (_find_largest_number(value) for name, value in config.items() if "layers_per_block" in name), default=0.0
        )
        if levels > MOST_LEVELS or layers > MOST_LAYERS:
            raise ValueError(f"{levels} levels of {layers:g} layers")
        with torch.device("meta"):
            sketch = kind.from_config(config)
    except Exception as error:  # an invalid config may raise any exception in diffusers
        raise _build_unreadable_error(where, format_error_line(error)) from error
    # The smallest format of saved weights has 2 bytes per number.
    least = 2 * sum(tensor.numel() for tensor in sketch.state_dict().values())
    if least > size:
        raise _build_unreadable_error(
            where, f"it describes weights of at least {least:,} bytes, and there are {size:,}"
        )
    return sketch


def _find_largest_number(value: Any) -> float:
    """Return the largest number in nested lists; infinity for anything that is not a number."""
    if isinstance(value, list):
        return max(map(_find_largest_number, value), default=0.0)
    if value is None:
        return 0.0
    return float(value) if isinstance(value, (int, float)) else math.inf


def _build_unreadable_error(place: Path, why: str) -> BadData:
    return BadData(
        f"{place} cannot be used: {why}",
        allowed=f"{CONFIG} and {WEIGHTS} as save_pretrained writes them, or the folder of a finished run",
        do="save or copy it again; it may be cut off, or edited",
    )


ORIGIN = "autoencoder_origin"
"""An entry of a run's facts: the digest and the scale of the autoencoder it was started with."""


@dataclass(frozen=True)
class ResumableRun:
    """A run with a checkpoint to resume from."""

    folder: Path
    facts: Mapping[str, Any]
    """The facts it saved about its parts."""


def find_resumable_run(folder: str | None) -> ResumableRun | None:
    """Return the run in a folder; None if it has no checkpoint yet and starts from its recipe."""
    if folder is None or not list_generations(Path(folder) / CHECKPOINTS):
        return None
    facts = read_json(Path(folder) / FACTS)
    return ResumableRun(Path(folder), facts) if isinstance(facts, dict) else None


def load_original_autoencoder(where: str, run: ResumableRun | None) -> tuple[PretrainedAutoencoder, list[str]]:
    """Return the autoencoder in the folder `where`, or a resumed run's own, with a note where the two differ.

    The checkpoint restores the weights only after the data was encoded: with the latents of another autoencoder, the
    denoiser would learn latents that its own autoencoder cannot decode.
    """
    origin = run.facts.get(ORIGIN) if run is not None else None
    if run is None or not isinstance(origin, dict):
        return load_pretrained_autoencoder(where), []
    try:
        kept = load_pretrained_autoencoder(where)
    except HalfstepError:
        became = "is gone, or cannot be used any more"
    else:
        if kept.digest == origin.get("digest"):
            return kept, []
        became = "contains another one now"
    return _load_checkpoint_autoencoder(run, origin), [f"the autoencoder is that of the checkpoint: {where} {became}"]


def _load_checkpoint_autoencoder(run: ResumableRun, origin: Mapping[str, Any]) -> PretrainedAutoencoder:
    newest, _ = find_newest_intact(run.folder / CHECKPOINTS)
    assert newest is not None, "a started run has one"
    place, config, prefix = newest.generation, run.facts.get(AUTOENCODER), f"{AUTOENCODER}."
    saved = State.from_parts(*read_rank_state(place, 0), where=str(place.path)).weights["parameters"]
    try:
        module = build_autoencoder(config)  # type: ignore[arg-type]
        module.load_state_dict({n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)})
    except Exception as error:  # edited facts may raise any exception in diffusers
        raise StateMismatch(
            f"{place.path} does not contain the autoencoder that {FACTS} describes: {format_error_line(error)[:200]}",
            allowed="the checkpoint and the facts of one run",
            do=f"bring both back from a copy, or {advise_new_run()}",
        ) from error
    return PretrainedAutoencoder(module.eval(), origin.get("scale"), str(origin.get("digest")), dict(config or {}))


DENOISER = "denoiser"
KINDS = ("UNet2DModel", "UNet2DConditionModel")


class PartBuilder:
    """Builds the parts of a model; a finished or resumed run builds them without the folders they came from."""

    def __init__(self, options: Any, data: Any, folder: str | None = None) -> None:
        """`folder` is the run's own, from which it may resume."""
        self._options, self._data = options, data
        self._resumed = find_resumable_run(folder)
        self._autoencoder: dict[str, object] | None = None
        self._origin: dict[str, Any] | None = None
        self._denoiser: dict[str, object] | None = None
        # The checkpoint restores the denoiser's weights; only its config is needed before.
        self._known: Mapping[str, object] = self._resumed.facts if self._resumed is not None else {}
        self._finished = False
        self.notes: list[str] = []
        """Lines for the user about the origin of a part."""

    def facts(self) -> dict[str, Any]:
        """Return the configs needed to build the same parts again, as plain data."""
        options = self._options
        if self._autoencoder is None and options.autoencoder not in ("new", "none"):
            self.autoencoder()
        if self._denoiser is None and options.stage != "autoencoder" and options.denoiser != "new":
            self._pretrained_denoiser()
        autoencoder = self._new() if options.autoencoder == "new" else self._autoencoder
        found = {AUTOENCODER: autoencoder, ORIGIN: self._origin, DENOISER: self._denoiser}
        return {name: config for name, config in found.items() if config is not None}

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Use the facts of a finished run; its weights file includes the frozen parts."""
        self._autoencoder, self._origin = facts.get(AUTOENCODER), facts.get(ORIGIN)
        self._denoiser, self._known = facts.get(DENOISER), facts
        self._finished = bool(facts)

    def autoencoder(self) -> tuple[AutoencoderKL | None, float | None]:
        """Return the autoencoder, and the scale it was published with, None if there is none."""
        where = self._options.autoencoder
        if where == "none":
            return None, None
        if where == "new":
            return build_autoencoder(self._new()), None
        if self._finished and self._autoencoder is not None:
            return build_autoencoder(self._autoencoder), (self._origin or {}).get("scale")
        kept, self.notes = load_original_autoencoder(where, self._resumed)
        self._autoencoder, self._origin = kept.config, {"digest": kept.digest, "scale": kept.scale}
        return kept.module, kept.scale

    def denoiser(self, latents: int, size: int, asked: ConditionSpec) -> nn.Module | None:
        """Return the denoiser for `latents` channels and `size` positions per side; None if the stage trains
        none.
        """
        options = self._options
        if options.stage == "autoencoder":
            return None
        if options.denoiser == "new":
            return build_denoiser(options, latents, size, asked)
        denoiser = self._pretrained_denoiser()
        check_denoiser(denoiser, options.denoiser, options, latents, asked)
        return denoiser

    def _new(self) -> dict[str, object]:
        return build_autoencoder_config(self._options, self._data.channels, self._data.size)

    def _pretrained_denoiser(self) -> nn.Module:
        known = self._known.get(DENOISER)
        if isinstance(known, dict) and known.get("kind") in KINDS:
            self._denoiser = known
            config = {name: value for name, value in known.items() if name != "kind"}
            module: nn.Module = getattr(diffusers, known["kind"])(**config)
            return module
        denoiser = load_pretrained_denoiser(self._options.denoiser)
        self._denoiser = {"kind": type(denoiser).__name__, **extract_plain_config(denoiser)}
        return denoiser


def build_latent_diffusion(options: Any, data: Any, asked: ConditionSpec, origins: PartBuilder) -> LatentDiffusion:
    """Build the model of a diffusion recipe. A denoiser's autoencoder is frozen, and keeps the scale it came with.

    Raise `BadRecipe` where images do not fit the parts.
    """
    autoencoder, scale = origins.autoencoder()
    stride, channels = 1, data.channels
    if autoencoder is not None:
        stride, channels = compute_latent_stride(autoencoder.config), autoencoder.config["latent_channels"]
        check_image_channels(data.channels, autoencoder.config["in_channels"], options.autoencoder)
    denoiser = origins.denoiser(channels, data.size // stride, asked)
    lower: Any = None if denoiser is None else denoiser.config
    check_image_size(data, stride if lower is None else stride * compute_latent_stride(lower))
    condition = ImageCondition(asked.channels, options.condition_width, stride) if asked.kind == "image" else None
    model = LatentDiffusion(autoencoder, denoiser, NoiseSchedule(options), asked, condition)
    if scale is not None:
        model.latent_scale.fill_(scale)
    model.measures_scale = options.stage == "both" and autoencoder is not None and scale is None
    if options.stage == "denoiser":
        model.freeze_autoencoder()
    if autoencoder is not None and is_autoencoder_island(options):
        island(model, "autoencoder")
    if denoiser is not None:
        # bf16 rounds integers above 256, so that neighboring timesteps would become one.
        island(model, "denoiser.time_proj", "denoiser.time_embedding")
    return model


def is_autoencoder_island(options: Any) -> bool:
    """Return whether the autoencoder computes in fp32 regardless of the run's precision."""
    frozen = options.stage == "denoiser"
    return bool(options.autoencoder_island == "always" or (frozen and options.autoencoder_island == "frozen"))
