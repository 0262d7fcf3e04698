"""Autoencoders and denoisers that were trained before: by a run, or in a local diffusers folder.

Nothing is downloaded, and nothing is unpickled: weights are .safetensors files alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors import SafetensorError
from torch import nn

from halfstep.errors import BadData, StateMismatch, Unsafe, in_one_line
from halfstep.files import read_json
from halfstep.tasks._finished import checked, recipe_in
from halfstep.tasks.options.diffusion import SCHEMA
from halfstep.train.keeping import BEST, FACTS, LAST
from halfstep.train.recipe.sources import read_recipe
from halfstep.train.run_folder import RECIPE
from halfstep.train.weights import digest, finite, load_weights

AUTOENCODER = "autoencoder"
"""Its place in the model of a run, and its description in the run's facts."""
CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
"""Names the files of weights that are in several."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MOST_LAYERS, MOST_LEVELS = 64, 64
"""Of a network that a folder describes: building one takes time before anything else can be seen of it."""
MOVED = ("shift_factor", "latents_mean", "latents_std")
"""What diffusers' configs say of latents that are moved, and not only scaled."""
TRAIN_ONE = "train one with model.stage=autoencoder, then write model.autoencoder=runs/NAME"
_AUTOENCODERS = {"AutoencoderKL": AutoencoderKL}
_DENOISERS = {"UNet2DModel": UNet2DModel, "UNet2DConditionModel": UNet2DConditionModel}


@dataclass(frozen=True)
class KeptAutoencoder:
    """An autoencoder with its trained weights."""

    module: AutoencoderKL
    scale: float | None
    """What its latents are multiplied by; None where nobody has said, and it must be measured."""
    digest: str
    config: dict[str, Any]
    """Plain data, which `AutoencoderKL(**config)` builds the same module from."""


def kept_autoencoder(folder: str | Path) -> KeptAutoencoder:
    """From the folder of a run that trained one, or from a diffusers folder, or a pipeline's with `vae` in it."""
    place, scale = Path(folder).expanduser(), None
    module: AutoencoderKL
    if (place / RECIPE).is_file():
        module = _from_run(place)
    else:
        module, config = _from_diffusers(place, "vae", _AUTOENCODERS, TRAIN_ONE)
        scale = _own_scale(config, place)
    return KeptAutoencoder(module, scale, digest(module), plain_config(module))


def kept_denoiser(folder: str | Path) -> nn.Module:
    """From a diffusers folder, or a pipeline's with `unet` in it."""
    do = "write model.denoiser=FOLDER with the folder that save_pretrained wrote, or model.denoiser=new"
    module: nn.Module = _from_diffusers(Path(folder).expanduser(), "unet", _DENOISERS, do)[0]
    return module


def plain_config(module: Any) -> dict[str, Any]:
    """What a module of diffusers was built with, for a JSON file."""
    return {name: value for name, value in dict(module.config).items() if not name.startswith("_")}


# -- of a run ---------------------------------------------------------------------------------------------------------


def _from_run(folder: Path) -> AutoencoderKL:
    _trained_one(folder)
    path = next((folder / name for name in (BEST, LAST) if (folder / name).is_file()), None)
    if path is None:
        raise BadData(
            f"{folder} holds no weights",
            allowed=f"a run with {BEST} or {LAST}",
            do="train the run to its first evaluation",
        )
    facts = read_json(folder / FACTS)
    config = facts.get(AUTOENCODER) if isinstance(facts, dict) else None
    sketch = _sketch(AutoencoderKL, config, folder / FACTS, path.stat().st_size)
    module = sketch.to_empty(device=torch.get_default_device())
    # Beside it lie a denoiser and more, which are none of our business; of the autoencoder, all must be there.
    report = load_weights(nn.ModuleDict({AUTOENCODER: module}), path, partial=True)
    if report.missing or report.shapes:
        raise StateMismatch(
            f"{path} does not hold the autoencoder that {FACTS} describes\n{report}",
            allowed="the weights and the facts of one run",
            do="train the run again, or give the folder of another one",
        )
    built: AutoencoderKL = module.eval()
    return built


def _trained_one(folder: Path) -> None:
    """Refuse a run of another task, and one that only used an autoencoder."""
    raw = read_recipe(str(recipe_in(folder))).raw
    allowed = "a run of the task diffusion with model.stage autoencoder or both"
    if raw.get("task") != "diffusion":
        given = f"{folder} is a run of the task {raw.get('task')}, which trains no autoencoder"
        raise BadData(given, allowed=allowed, do=TRAIN_ONE)
    model = checked(raw, SCHEMA, folder / RECIPE).model
    if model.stage == "denoiser":
        used = model.autoencoder
        do = TRAIN_ONE if used in ("new", "none") else f"write model.autoencoder={used}, which that run used"
        raise BadData(f"{folder} trained a denoiser, and no autoencoder", allowed=allowed, do=do)


# -- of diffusers -----------------------------------------------------------------------------------------------------


def _from_diffusers(folder: Path, part: str, kinds: Mapping[str, Any], do: str) -> tuple[Any, dict[str, Any]]:
    """The module in a folder, or in the `part` of a pipeline's, and its config as it is written there."""
    place = folder if (folder / CONFIG).is_file() else folder / part
    config = read_json(place / CONFIG)
    allowed = f"a local folder with {CONFIG} of {' or '.join(kinds)} and {WEIGHTS}"
    if not isinstance(config, dict):
        there = "" if folder.is_dir() else ": there is no such folder"
        raise BadData(f"no {' or '.join(kinds)} in {folder}{there}", allowed=allowed, do=do)
    name = str(config.get("_class_name"))
    if name not in kinds:
        raise BadData(f"{place} holds {name[:80]}", allowed=allowed, do=do)
    if config.get("quantization_config") is not None:
        raise BadData(f"{place} holds quantized weights", allowed=allowed, do="save it without quantization")
    size = sum((place / file).stat().st_size for file in _number_files(place))
    _sketch(kinds[name], config, place / CONFIG, size)
    return _loaded(kinds[name], place), config


def _number_files(place: Path) -> list[str]:
    """The files of weights, none of which can run code, and none of which lies elsewhere."""
    again = "save it again with diffusers: module.save_pretrained(FOLDER)"
    allowed = f"{WEIGHTS} in {place}"
    index = read_json(place / INDEX)
    files = index.get("weight_map") if isinstance(index, dict) else {"": WEIGHTS}
    names = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise Unsafe(f"{place / INDEX} names the file {name[:80]!r}", allowed=allowed, do=again)
    if names and all((place / name).is_file() for name in names):
        return names
    pickles = sorted(file.name for file in place.iterdir() if file.suffix in PICKLES)
    if pickles:
        given = f"{place} holds {pickles[0]}, a pickle, which can run code when it is read"
        raise Unsafe(given, allowed=allowed, do=f"where you trust it, {again}")
    raise BadData(f"{place} lacks files of weights", allowed=allowed, do=again)


def _loaded(kind: Any, place: Path) -> Any:
    try:
        module, info = kind.from_pretrained(
            str(place),
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,  # otherwise it asks for another package, and says so each time
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        raise _unreadable(place, in_one_line(error)) from error
    # diffusers fills what is missing with random numbers.
    lacking = [*info["missing_keys"], *info["mismatched_keys"], *info["error_msgs"]]
    if lacking:
        raise _unreadable(place, f"{len(lacking)} tensors are missing or of another shape, first {lacking[0]}")
    if not finite(module):
        raise BadData(
            f"{place} has weights that are not finite",
            allowed="finite weights",
            do="take weights from before they went wrong",
        )
    return module


def _own_scale(config: Mapping[str, Any], place: Path) -> float | None:
    """Its scaling factor, where it is written there: diffusers' own default belongs to one autoencoder alone."""
    moved = [name for name in MOVED if config.get(name)]
    if moved:
        raise BadData(
            f"{place} has latents with a {moved[0]}",
            allowed="latents that are scaled, and not moved",
            do=f"take an autoencoder without {moved[0]}, or {TRAIN_ONE}",
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


# -- of both ----------------------------------------------------------------------------------------------------------


def _sketch(kind: Any, config: Any, where: Path, size: int) -> Any:
    """The module without its numbers; before memory is taken for it, `size` bytes of weights must be enough."""
    if not isinstance(config, dict):
        raise _unreadable(where, f"it describes no {kind.__name__}")
    try:
        _bounded(config)
        with torch.device("meta"):
            sketch = kind.from_config(config)
    except Exception as error:  # a config that was made up ends in whatever stumbles over it
        raise _unreadable(where, in_one_line(error)) from error
    least = 2 * sum(tensor.numel() for tensor in sketch.state_dict().values())
    if least > size:
        raise _unreadable(where, f"it describes weights of at least {least:,} bytes, and there are {size:,}")
    return sketch


def _bounded(config: Mapping[str, Any]) -> None:
    """ValueError for a network of more blocks than anybody builds."""
    levels = max((len(value) for value in config.values() if isinstance(value, list)), default=0)
    layers = max((_most(value) for name, value in config.items() if "layers_per_block" in name), default=0.0)
    if levels > MOST_LEVELS or layers > MOST_LAYERS:
        raise ValueError(f"{levels} levels of {layers:g} layers")


def _most(value: Any) -> float:
    """The largest number in nested lists; what is no number is too large."""
    if isinstance(value, list):
        return max(map(_most, value), default=0.0)
    if value is None:
        return 0.0
    return float(value) if isinstance(value, (int, float)) else math.inf


def _unreadable(place: Path, why: str) -> BadData:
    return BadData(
        f"{place} cannot be used: {why}",
        allowed=f"{CONFIG} and {WEIGHTS} as save_pretrained writes them, or the folder of a finished run",
        do="save or copy it again; it may be cut off, or edited",
    )
