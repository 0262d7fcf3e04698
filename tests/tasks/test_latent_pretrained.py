"""Trained autoencoders and denoisers from folders: the same numbers come back, and nothing else is taken."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import AutoencoderKL, UNet2DConditionModel, UNet2DModel
from safetensors.torch import load_file, save_file

from halfstep.errors import BadData, HalfstepError, StateMismatch, Unsafe
from halfstep.files import write_json
from halfstep.tasks.models.latent.pretrained import (
    CONFIG,
    INDEX,
    WEIGHTS,
    extract_plain_config,
    load_pretrained_autoencoder,
    load_pretrained_denoiser,
)
from halfstep.train.outputs import BEST, FACTS, LAST
from halfstep.train.weights import compute_weights_digest

SMALL = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 2,
    "norm_num_groups": 4,
    "sample_size": 8,
}


def autoencoder(**changes: Any) -> Any:
    return AutoencoderKL(**{**SMALL, **changes}).eval()


def unet(kind: Any) -> Any:
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "block_out_channels": [8]}
    return kind(in_channels=2, out_channels=2, norm_num_groups=4, layers_per_block=1, **blocks).eval()


def kept_in(folder: Path, **changes: Any) -> Any:
    """A diffusers folder, and the module that was saved into it."""
    module = autoencoder(**changes)
    module.save_pretrained(folder)
    return module


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config.update(changes)
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- diffusers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "vae"])
def test_a_diffusers_folder_gives_its_weights_and_its_own_scale(tmp_path: Path, inside: str) -> None:
    module = kept_in(tmp_path / inside, scaling_factor=0.5)
    found = load_pretrained_autoencoder(tmp_path)
    images = torch.randn(2, 3, 8, 8)
    assert same(found.module, module)
    assert torch.equal(found.module.encode(images).latent_dist.parameters, module.encode(images).latent_dist.parameters)
    assert (found.scale, found.digest) == (0.5, compute_weights_digest(module))
    again = AutoencoderKL(**json.loads(json.dumps(found.config)))
    again.load_state_dict(found.module.state_dict())
    assert torch.equal(again.eval().encode(images).latent_dist.parameters, module.encode(images).latent_dist.parameters)


def test_a_scale_that_nobody_wrote_is_not_assumed(tmp_path: Path) -> None:
    kept_in(tmp_path)
    edit(tmp_path, scaling_factor="gone")
    assert load_pretrained_autoencoder(tmp_path).scale is None


@pytest.mark.wording
@pytest.mark.parametrize("scale", [0, -0.5, "much", float("nan"), float("inf")])
def test_a_scale_that_is_none(tmp_path: Path, scale: Any) -> None:
    kept_in(tmp_path)
    edit(tmp_path, scaling_factor=scale)
    with pytest.raises(BadData, match="scaling_factor"):
        load_pretrained_autoencoder(tmp_path)


@pytest.mark.wording
@pytest.mark.parametrize("moved", [{"shift_factor": 0.1}, {"latents_mean": [0.1, 0.2]}])
def test_latents_that_are_moved_are_refused(tmp_path: Path, moved: dict[str, Any]) -> None:
    kept_in(tmp_path, **moved)
    with pytest.raises(BadData, match=next(iter(moved))) as caught:
        load_pretrained_autoencoder(tmp_path)
    assert caught.value.do


def test_weights_in_16_bits_come_back_in_32(tmp_path: Path) -> None:
    autoencoder().to(torch.float16).save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_pretrained_autoencoder(tmp_path).module.state_dict().values()} == {
        torch.float32
    }


def test_weights_in_several_files(tmp_path: Path) -> None:
    module = autoencoder()
    module.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / INDEX).is_file()
    assert same(load_pretrained_autoencoder(tmp_path).module, module)


@pytest.mark.parametrize("kind", [UNet2DModel, UNet2DConditionModel])
@pytest.mark.parametrize("inside", ["", "unet"])
def test_a_denoiser(tmp_path: Path, kind: Any, inside: str) -> None:
    module = unet(kind)
    module.save_pretrained(tmp_path / inside)
    found = load_pretrained_denoiser(tmp_path)
    assert isinstance(found, kind)
    assert same(found, module)


# -- what is not taken ------------------------------------------------------------------------------------------------


class Writes:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.wording
def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    kept_in(tmp_path / "vae")
    (tmp_path / "vae" / WEIGHTS).unlink()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Writes(tmp_path / "ran")))
    with pytest.raises(Unsafe, match=r"diffusion_pytorch_model\.bin, a pickle") as caught:
        load_pretrained_autoencoder(tmp_path)
    assert "save_pretrained" in caught.value.do
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_the_name_of_numbers(tmp_path: Path) -> None:
    kept_in(tmp_path / "vae")
    (tmp_path / "vae" / WEIGHTS).write_bytes(pickle.dumps(Writes(tmp_path / "ran")) + bytes(100_000))
    with pytest.raises(HalfstepError):
        load_pretrained_autoencoder(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.wording
@pytest.mark.parametrize("name", ["../secret.safetensors", "weights.bin", "/etc/x.safetensors"])
def test_an_index_that_points_elsewhere(tmp_path: Path, name: str) -> None:
    kept_in(tmp_path)
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": {"encoder.conv_in.weight": name}})
    with pytest.raises(Unsafe, match="names the file"):
        load_pretrained_autoencoder(tmp_path)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def without_one(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("encoder.conv_in.weight")
    save_file(tensors, folder / WEIGHTS)


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["encoder.conv_in.weight"][0] = torch.nan
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "cannot be used"),
        (without_one, r"missing or of another shape, first encoder\.conv_in\.weight"),
        (with_nan, "not finite"),
        (lambda folder: (folder / WEIGHTS).unlink(), "lacks files of weights"),
        (lambda folder: edit(folder, _class_name="VQModel"), "contains VQModel"),
        (lambda folder: edit(folder, _class_name=["AutoencoderKL"]), r"contains \['AutoencoderKL'\]"),
        (lambda folder: edit(folder, quantization_config={"quant_method": "x"}), "quantized"),
        (lambda folder: edit(folder, block_out_channels=[10**6, 10**6]), "at least"),
        (lambda folder: edit(folder, layers_per_block=10**9), "layers"),
        (lambda folder: edit(folder, block_out_channels="many"), "cannot be used"),
        (lambda folder: (folder / CONFIG).write_text("[" * 10_000), "no AutoencoderKL in"),
    ],
)
def test_a_folder_that_was_spoilt(tmp_path: Path, spoil: Any, words: str) -> None:
    kept_in(tmp_path)
    spoil(tmp_path)
    with pytest.raises(BadData, match=words) as caught:
        load_pretrained_autoencoder(tmp_path)
    assert caught.value.do


@pytest.mark.wording
def test_no_folder_and_the_wrong_part(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"no AutoencoderKL in .*nowhere: there is no such folder") as caught:
        load_pretrained_autoencoder(tmp_path / "nowhere")
    assert "model.stage=autoencoder" in caught.value.do
    kept_in(tmp_path)
    with pytest.raises(BadData, match="contains AutoencoderKL"):
        load_pretrained_denoiser(tmp_path)


# -- runs -------------------------------------------------------------------------------------------------------------


def run_in(folder: Path, *, files: tuple[str, ...] = (BEST,), task: str = "diffusion", **model: Any) -> Any:
    """The folder of a run as training leaves it, and its autoencoder."""
    module = autoencoder()
    recipe = {"task": task, "model": {"stage": "autoencoder", **model}, "data": {}, "loss": {}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_json(folder / FACTS, {"classes": [], "autoencoder": extract_plain_config(module)})
    tensors = {f"autoencoder.{name}": tensor for name, tensor in module.state_dict().items()}
    tensors |= {"latent_scale": torch.ones(()), "denoiser.weight": torch.randn(3)}
    for name in files:
        save_file(tensors, folder / name)
    return module


@pytest.mark.parametrize("files", [(BEST, LAST), (BEST,), (LAST,)])
@pytest.mark.parametrize("stage", ["autoencoder", "both"])
def test_a_run_gives_its_autoencoder_alone(tmp_path: Path, files: tuple[str, ...], stage: str) -> None:
    module = run_in(tmp_path, files=files, stage=stage)
    found = load_pretrained_autoencoder(tmp_path)
    assert same(found.module, module)
    assert not found.module.training
    assert (found.scale, found.digest, found.config) == (
        None,
        compute_weights_digest(module),
        extract_plain_config(module),
    )


def test_the_best_weights_come_first(tmp_path: Path) -> None:
    run_in(tmp_path, files=(LAST,))
    best = run_in(tmp_path, files=(BEST,))
    assert same(load_pretrained_autoencoder(tmp_path).module, best)


@pytest.mark.wording
def test_a_run_of_another_task(tmp_path: Path) -> None:
    run_in(tmp_path, task="segmentation")
    with pytest.raises(BadData, match="a run of the task segmentation") as caught:
        load_pretrained_autoencoder(tmp_path)
    assert "model.stage=autoencoder" in caught.value.do


@pytest.mark.wording
def test_a_run_that_only_used_an_autoencoder_names_it(tmp_path: Path) -> None:
    run_in(tmp_path, stage="denoiser", autoencoder="runs/first")
    with pytest.raises(BadData, match="trained a denoiser") as caught:
        load_pretrained_autoencoder(tmp_path)
    assert "model.autoencoder=runs/first" in caught.value.do


def spoil_run(folder: Path, change: Any) -> None:
    tensors = load_file(folder / BEST)
    change(tensors)
    save_file(tensors, folder / BEST)


@pytest.mark.wording
def test_a_run_without_weights_or_facts(tmp_path: Path) -> None:
    run_in(tmp_path, files=())
    with pytest.raises(BadData, match="contains no weights"):
        load_pretrained_autoencoder(tmp_path)
    run_in(tmp_path)
    for facts in ({}, {"autoencoder": None}, {"autoencoder": {"block_out_channels": "x"}}, []):
        write_json(tmp_path / FACTS, facts)
        with pytest.raises(BadData, match=r"task\.json cannot be used"):
            load_pretrained_autoencoder(tmp_path)


@pytest.mark.wording
def test_a_run_whose_numbers_are_not_finite(tmp_path: Path) -> None:
    run_in(tmp_path)
    spoil_run(tmp_path, lambda tensors: tensors["autoencoder.encoder.conv_in.weight"].fill_(torch.inf))
    with pytest.raises(BadData, match="not finite"):
        load_pretrained_autoencoder(tmp_path)


@pytest.mark.wording
def test_a_run_that_lacks_a_tensor(tmp_path: Path) -> None:
    run_in(tmp_path)
    spoil_run(tmp_path, lambda tensors: tensors.pop("autoencoder.encoder.conv_in.weight"))
    with pytest.raises(StateMismatch, match=r"autoencoder\.encoder\.conv_in\.weight"):
        load_pretrained_autoencoder(tmp_path)
