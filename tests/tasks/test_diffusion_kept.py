"""Diffusion on what was trained before: its scale, its latents on the disk, and a run whose folders are gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DModel
from safetensors.torch import load_file

import halfstep
from halfstep.errors import BadRecipe, StateMismatch, Stopped
from halfstep.journal.jsonl import read_events
from halfstep.precision.island import island
from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.diffusion import Diffusion, name_computed_format
from tests.tasks.made import batch_of
from tests.tasks.test_diffusion import diffusion, model_of

STILL = {"augment": "none"}


def folder(tmp_path: Path, scaled: float | None = None, channels: int = 3, seed: int = 0) -> str:
    """A diffusers folder with a small autoencoder; without a scaling factor of its own unless one is given."""
    torch.manual_seed(seed)
    module = AutoencoderKL(
        in_channels=channels,
        out_channels=channels,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[8, 16],
        norm_num_groups=2,
        latent_channels=4,
        **({} if scaled is None else {"scaling_factor": scaled}),
    )
    with torch.no_grad():  # latents whose spread is not one to begin with
        module.quant_conv.weight[:4] *= 20.0
        module.quant_conv.bias[4:] = -6.0
    module.save_pretrained(tmp_path / "vae")
    if scaled is None:
        config = json.loads((tmp_path / "vae" / "config.json").read_text())
        del config["scaling_factor"]
        (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "vae")


def on(place: str, data: dict[str, Any] | None = None, **model: Any) -> Diffusion:
    return diffusion({**STILL, **(data or {})}, stage="denoiser", autoencoder=place, **model)


def test_a_published_scale_is_kept(tmp_path: Path) -> None:
    task = on(folder(tmp_path, 0.75))
    model = model_of(task)
    lines = task.ready(model, resolve_precision_name("fp32"))
    assert model.latent_scale == 0.75
    assert not any("multiplied" in line for line in lines)


@pytest.mark.parametrize(("off", "told"), [(1.0, False), (2.0, False), (0.01, True), (100.0, True)])
def test_a_published_scale_that_does_not_fit_is_told(tmp_path: Path, off: float, told: bool) -> None:
    """As save_pretrained writes it: for an autoencoder of one's own too, that of another one."""
    measured = on(folder(tmp_path))
    fitting = model_of(measured)
    measured.ready(fitting, resolve_precision_name("fp32"))
    scale = off * fitting.latent_scale.item()
    task = on(folder(tmp_path, scale))
    model = model_of(task)
    lines = [line for line in task.ready(model, resolve_precision_name("fp32")) if "scaling_factor" in line]
    assert model.latent_scale.item() == pytest.approx(scale), "it is told, and not changed"
    assert bool(lines) is told
    assert not told or (f"{scale:.4g}" in lines[0] and f"deviation of {off:.2g}" in lines[0])


@pytest.mark.parametrize("times", [1e38, float("nan")])
def test_latents_that_need_no_scale_and_are_not_finite_are_left_to_the_guard(tmp_path: Path, times: float) -> None:
    task = on(folder(tmp_path, 0.75), {"cache_latents": False})
    model = model_of(task)
    assert model.autoencoder is not None
    with torch.no_grad():
        model.autoencoder.encoder.conv_out.weight *= times
    assert not any("scaling_factor" in line for line in task.ready(model, resolve_precision_name("fp32")))


@pytest.mark.parametrize("data", [{}, {"cache_latents": False}, {"augment": "flip"}])
def test_a_scale_is_measured_so_that_latents_have_a_spread_of_one(tmp_path: Path, data: dict[str, Any]) -> None:
    task = on(folder(tmp_path), data)
    model = model_of(task)
    lines = task.ready(model, resolve_precision_name("bf16"))
    images = torch.stack([task.transform("val", task.source("val").source.read(n))["image"] for n in range(4)])
    images = torch.cat([images, *(task._image(task.source("train").source.read(n))[None] for n in range(16))])
    with torch.no_grad():
        spread = model.latents(model.moments(images)).std().item()
        unscaled = spread / model.latent_scale.item()
    assert spread == pytest.approx(1.0, abs=0.15)
    assert not 0.5 < unscaled < 2.0
    assert f"multiplied by {model.latent_scale.item():.4g}" in lines[-1]
    assert ("moments" in task.source("train").read(0)) is (not data)


def test_cached_latents_are_those_of_the_images(tmp_path: Path) -> None:
    task = on(folder(tmp_path))
    model = model_of(task).eval()
    with torch.no_grad():
        before = task.loss(model, batch_of(task, "val"))
        task.ready(model, resolve_precision_name("fp32"))
        model.latent_scale.zero_()  # as it was before
        batch = batch_of(task, "val")
        assert "image" not in batch
        assert torch.allclose(task.loss(model, batch), before, rtol=1e-4)
        assert len(task.pictures(model, batch)) == 4
    assert torch.isfinite(task.loss(model.train(), batch_of(task, "train")))


def test_a_finished_run_needs_no_folder(tmp_path: Path) -> None:
    place = folder(tmp_path, 0.5)
    task = on(place)
    model = model_of(task).eval()
    facts = json.loads(json.dumps(task.facts()))
    image = task.source("val").read(0)["image"]
    expected = task.predict(model, image).values
    shutil.rmtree(place)
    again = on(place)
    again.remember(facts)
    copy = again.model()
    copy.load_state_dict(model.state_dict())
    assert copy.latent_scale == 0.5
    assert again.predict(copy.eval(), image).values == expected


def test_a_published_scale_is_kept_by_a_run_that_is_opened_again(tmp_path: Path) -> None:
    place = folder(tmp_path, 0.5)
    task = diffusion(STILL, stage="both", autoencoder=place)
    model_of(task)
    again = diffusion(STILL, stage="both", autoencoder=place)
    again.remember(json.loads(json.dumps(task.facts())))
    model = model_of(again).train()
    again.loss(model, batch_of(again, "train"))
    assert model.latent_scale == 0.5


def test_latents_are_kept_under_the_format_that_they_were_computed_in(tmp_path: Path) -> None:
    model = model_of(on(folder(tmp_path), autoencoder_island="never"))
    assert name_computed_format(model, resolve_precision_name("fp16")) == "fp16"
    island(model, "autoencoder.encoder.mid_block")  # as a guard does
    assert name_computed_format(model, resolve_precision_name("fp16")) == "fp16 but for encoder.mid_block"
    island(model, "autoencoder")
    assert name_computed_format(model, resolve_precision_name("fp16")) == "fp32"
    assert name_computed_format(model, resolve_precision_name("tf32")) == "tf32", "islands compute in it, too"


@pytest.mark.wording
def test_images_that_an_autoencoder_was_not_made_for(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match=r"data.channels=1"):
        on(folder(tmp_path), {"channels": 1}).model()
    with pytest.raises(BadRecipe, match=r"multiples of 4"):
        on(folder(tmp_path), {"size": 18}).model()


def unet(place: Path, channels: int = 4, classes: int | None = 5, **more: Any) -> str:
    module = UNet2DModel(
        in_channels=channels,
        out_channels=channels,
        down_block_types=["DownBlock2D"] * 2,
        up_block_types=["UpBlock2D"] * 2,
        block_out_channels=[8, 16],
        norm_num_groups=2,
        layers_per_block=1,
        num_class_embeds=classes,
        **more,
    )
    module.save_pretrained(place)
    return str(place)


def test_a_denoiser_from_a_folder(tmp_path: Path) -> None:
    place = unet(tmp_path / "unet")
    task = diffusion(denoiser=place)
    model = model_of(task)
    saved = UNet2DModel.from_pretrained(place, low_cpu_mem_usage=False)
    assert torch.equal(model.denoiser.conv_in.weight, saved.conv_in.weight)  # type: ignore[union-attr]
    assert torch.isfinite(task.loss(model, batch_of(task, "train")))
    facts = json.loads(json.dumps(task.facts()))
    shutil.rmtree(place)
    again = diffusion(denoiser=place)
    again.remember(facts)
    again.model().load_state_dict(model.state_dict())


@pytest.mark.wording
@pytest.mark.parametrize(
    ("wrong", "condition", "words"),
    [({"channels": 3}, "class", "in_channels=3"), ({"classes": 4}, "class", "num_class_embeds=4"), ({}, "none", "=5")],
)
def test_a_denoiser_for_something_else_is_refused(
    tmp_path: Path, wrong: dict[str, int], condition: str, words: str
) -> None:
    with pytest.raises(BadRecipe, match=words):
        diffusion(denoiser=unet(tmp_path / "unet", **wrong), condition=condition).model()


@pytest.mark.wording
def test_a_denoiser_from_a_folder_that_wants_more_is_refused(tmp_path: Path) -> None:
    timed = unet(tmp_path / "timed", classes=None, class_embed_type="timestep")
    with pytest.raises(BadRecipe, match="class_embed_type=timestep"):
        diffusion(denoiser=timed, condition="none").model()
    with pytest.raises(BadRecipe, match=r"multiples of 4"):  # two levels each
        diffusion({"size": 18}, denoiser=unet(tmp_path / "unet")).model()


class Interrupted(Diffusion):
    """Is asked to stop in its third step."""

    steps = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.steps += model.training
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch, metrics)


def trained(tmp_path: Path, name: str, task: Any = None) -> dict[str, torch.Tensor]:
    parts = [f"model.autoencoder={tmp_path / 'vae'}", f"model.denoiser={tmp_path / 'unet'}", "model.stage=denoiser"]
    small = ["data.samples=20", "train.epochs=2", "train.batch_size=4", "run.pictures=0", "precision=fp32"]
    settings = [*parts, *small, f"run.dir={tmp_path / name}"]
    halfstep.fit("diffusion_tiny", task=task, settings=settings, quiet=True)
    return load_file(tmp_path / name / "last.safetensors")


@pytest.mark.parametrize("became", ["is gone", "contains another one"])
def test_an_interrupted_run_goes_on_with_the_parts_that_it_was_begun_with(tmp_path: Path, became: str) -> None:
    folder(tmp_path)
    unet(tmp_path / "unet")
    whole = trained(tmp_path, "whole")
    with pytest.raises(Stopped):
        trained(tmp_path, "run", Interrupted)
    for part in ("vae", "unet"):
        shutil.rmtree(tmp_path / part)
    if became == "contains another one":
        folder(tmp_path, seed=1)
        unet(tmp_path / "unet")
    resumed = trained(tmp_path, "run")
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    [*_, start] = (event for event in read_events(tmp_path / "run" / "journal.jsonl") if event["event"] == "start")
    assert any("that of the checkpoint" in note and became in note for note in start["notes"])


@pytest.mark.wording
def test_facts_that_are_not_the_checkpoints_are_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    unet(tmp_path / "unet")
    with pytest.raises(Stopped):
        trained(tmp_path, "run", Interrupted)
    shutil.rmtree(tmp_path / "vae")
    facts = json.loads((tmp_path / "run" / "task.json").read_text())
    facts["autoencoder"]["block_out_channels"] = [8, 24]
    (tmp_path / "run" / "task.json").write_text(json.dumps(facts))
    with pytest.raises(StateMismatch, match=r"does not contain the autoencoder that task\.json describes"):
        trained(tmp_path, "run")
