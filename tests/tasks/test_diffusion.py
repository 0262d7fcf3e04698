"""Diffusion: stages and what each trains, scales, islands, conditions, and settings that cannot go together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfstep import Stepper
from halfstep.errors import BadRecipe, WrongUse
from halfstep.precision.island import is_island
from halfstep.precision.precision import resolve_precision_name
from halfstep.tasks.diffusion import Diffusion
from halfstep.tasks.models.latent.model import Condition, LatentDiffusion
from halfstep.tasks.models.latent.noise import compute_kl_divergence, compute_reconstruction_loss
from tests.support.combinations import one_per_value
from tests.tasks.made import batch_of, made

CPU = torch.device("cpu")
PIXELS = {"stage": "denoiser", "autoencoder": "none"}
MAPS = {"name": "maps", "channels": 1, "condition_channels": 2, "augment": "none"}


def diffusion(data: dict[str, Any] | None = None, loss: dict[str, Any] | None = None, **model: Any) -> Diffusion:
    task = made("diffusion", model=model, data=data or {}, loss=loss or {})
    assert isinstance(task, Diffusion)
    return task


def model_of(task: Diffusion) -> LatentDiffusion:
    torch.manual_seed(0)
    model = task.model()
    assert isinstance(model, LatentDiffusion)
    return model


def embedded(tmp_path: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    """Embeddings of the drawn shapes, by their names."""
    torch.manual_seed(0)
    names = [f"shapes 0/{n}" for n in range(20)]
    save_file({name: torch.randn(shape) for name in names}, tmp_path / "embeddings.safetensors")
    return {"embeddings": str(tmp_path / "embeddings.safetensors")}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ({"stage": "denoiser"}, {}, "model.stage=both"),
        ({"stage": "denoiser"}, {}, "model.autoencoder=runs/NAME"),
        ({"stage": "autoencoder", "autoencoder": "none"}, {}, "model.autoencoder=new"),
        ({"stage": "both", "autoencoder": "none"}, {}, "model.stage=denoiser"),
        ({"attention_levels": 3}, {}, "model.attention_levels=2"),
        ({}, {"size": 18}, "data.size=20"),
        (PIXELS, {"size": 17}, "data.size=18"),
        ({"stage": "autoencoder"}, {"size": 17}, "data.size=17, which the model halves once"),
        ({"sample_steps": 101}, {}, "model.sample_steps=100"),
        ({"sample_steps": 60}, {}, "model.sample_steps=50"),
        ({"condition": "class"}, {"name": "maps", "classes": None}, "model.condition"),
        ({"condition_drop": 0.0}, {}, "write model.guidance=1"),
        ({"condition_drop": 0.0, "guidance": 0.0}, {}, "model.condition_drop=0.1"),
    ],
)
def test_settings_that_cannot_go_together_say_what_to_write(
    model: dict[str, Any], data: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRecipe) as raised:
        diffusion(data, **model).model()
    assert words in str(raised.value)


def test_only_models_that_look_at_no_image_are_said_to_generate() -> None:
    assert diffusion(**PIXELS).generates
    assert not diffusion(stage="autoencoder").generates
    assert not diffusion(MAPS, **PIXELS, condition="image").generates


def test_uneven_steps_are_ddpms() -> None:
    assert diffusion(sample_steps=60, sampler="ddpm").recipe.model.sample_steps == 60


STAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": "autoencoder"}, {}),
    ({"stage": "both", "condition": "none"}, {}),
    ({"stage": "both", "prediction": "v", "layers": 2, "attention_levels": 0}, {}),
    ({**PIXELS, "condition": "class"}, {}),
    ({**PIXELS, "condition": "image", "condition_width": 4}, MAPS),
    ({"stage": "both", "condition": "image", "condition_width": 4}, MAPS),
]


@pytest.mark.parametrize(*one_per_value(stage=STAGES, precision=["fp32", "bf16", "fp16"]))
def test_every_stage_and_condition_takes_steps(stage: tuple[dict[str, Any], dict[str, Any]], precision: str) -> None:
    model, data = stage
    task = diffusion(data, {"min_snr": 5.0}, **model)
    net = model_of(task)
    stepper = Stepper(net, torch.optim.AdamW(net.parameters(), 1e-3), precision=resolve_precision_name(precision))
    batch = batch_of(task, "train", 2)
    reports = [stepper.step(task.loss, batch) for _ in range(2)]
    assert all(torch.isfinite(torch.as_tensor(report.loss)) for report in reports)
    assert reports[-1].applied


@pytest.mark.parametrize("shape", [(3, 6), (6,)])
def test_embeddings_reach_the_denoiser(tmp_path: Path, shape: tuple[int, ...]) -> None:
    task = diffusion(embedded(tmp_path, shape), condition="embedding")
    assert task.facts()["embedding"] == ([3, 6] if len(shape) == 2 else [1, 6])
    model, batch = model_of(task).eval(), batch_of(task, "val")
    with torch.no_grad():
        loss = task.loss(model, batch)
        other = task.loss(model, {**batch, "embedding": batch["embedding"] + 3.0})
    assert torch.isfinite(loss)
    assert loss != other
    task.loss(model.train(), batch).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_an_embedding_that_is_bad_is_passed_over_from_the_beginning(tmp_path: Path) -> None:
    data = embedded(tmp_path, (3, 6))
    task = diffusion(data, condition="embedding")
    tensors = {name: tensor.clone() for name, tensor in load_file(data["embeddings"]).items()}
    for split in ("train", "val"):
        tensors[task.source(split).key(0)][0, 0] = torch.nan  # type: ignore[attr-defined]
    save_file(tensors, tmp_path / "bad.safetensors")
    again = diffusion({"embeddings": str(tmp_path / "bad.safetensors")}, condition="embedding")
    assert again.facts()["embedding"] == [3, 6]
    assert isinstance(again.model(), LatentDiffusion)


def test_the_loss_of_an_autoencoder_is_what_it_is_by_hand() -> None:
    task = diffusion(stage="autoencoder", loss={"kl": 0.5})
    model, batch = model_of(task).eval(), batch_of(task, "val")
    moments = model.moments(batch["image"])
    mean, spread = moments.double().chunk(2, dim=1)
    kl = 0.5 * (mean**2 + spread.exp() - 1 - spread).sum((1, 2, 3)).mean() / (3 * 16 * 16)
    assert compute_kl_divergence(moments, batch["image"]).item() == pytest.approx(kl.item(), rel=1e-4)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(20_011))
    said = model.autoencoder.decode(mean.float() + (0.5 * spread.float()).exp() * noise).sample
    expected = (said - batch["image"]).double().square().mean() + 0.5 * kl
    assert task.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-4)
    assert compute_reconstruction_loss(said, said).item() == 0.0


def test_the_denoiser_teaches_the_autoencoder_nothing() -> None:
    task = diffusion()
    model, batch = model_of(task), batch_of(task, "train")

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model.latent_scale.zero_()
        task.loss(model, batch).backward()
        assert model.autoencoder is not None
        return [p.grad.clone() for p in model.autoencoder.parameters()]

    together = gradients()
    model.denoiser = None
    alone = gradients()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_the_scale_follows_the_latents_in_training_only() -> None:
    task = diffusion()
    model, batch = model_of(task), batch_of(task, "train", 8)
    assert model.latent_scale == 0.0
    model.eval()
    task.loss(model, batch)
    assert model.latent_scale == 0.0
    model.train()
    moments = model.moments(batch["image"])
    latents = model.latents(moments)
    assert latents.std().item() == pytest.approx(1.0, abs=1e-3)
    mean, spread = moments.detach().chunk(2, dim=1)
    for _ in range(400):
        model.latents(torch.cat([10.0 * mean, spread - 30.0], dim=1))
    assert model.latent_scale.item() == pytest.approx(0.1 / mean.std().item(), rel=0.01)
    assert not model.latent_scale.requires_grad


@pytest.mark.parametrize("scale", [0.0, 0.2, 7.0])
@torch.no_grad()
def test_images_do_not_depend_on_the_scale(scale: float) -> None:
    task = diffusion()
    model = model_of(task).eval()
    moments = model.moments(batch_of(task, "val")["image"])
    model.latent_scale.fill_(scale)
    latents = model.latents(moments, torch.zeros_like)
    mean = moments.chunk(2, dim=1)[0]
    torch.testing.assert_close(latents, mean * (scale or 1.0))
    torch.testing.assert_close(model.pixels(latents), model.autoencoder.decode(mean).sample)


def test_a_frozen_autoencoder_stays_as_it_is(tmp_path: Path) -> None:
    model_of(diffusion()).autoencoder.save_pretrained(tmp_path)  # type: ignore[union-attr]
    task = diffusion(stage="denoiser", autoencoder=str(tmp_path))
    model = copy.deepcopy(model_of(task).train())
    model.train()
    vae = model.autoencoder
    assert vae is not None
    assert not any(module.training for module in vae.modules())
    assert not any(p.requires_grad for p in vae.parameters())
    assert model.denoiser.training  # type: ignore[union-attr]
    task.loss(model, batch_of(task, "train")).backward()
    assert all(p.grad is None for p in vae.parameters())
    assert all(p.grad is not None for p in model.denoiser.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize(("when", "stage", "raised"), [
    ("frozen", "denoiser", True), ("never", "denoiser", False), ("always", "both", True), ("frozen", "both", False),
])  # fmt: skip
def test_islands_are_where_the_recipe_wants_them(tmp_path: Path, when: str, stage: str, raised: bool) -> None:
    model_of(diffusion()).autoencoder.save_pretrained(tmp_path)  # type: ignore[union-attr]
    model = model_of(diffusion(stage=stage, autoencoder=str(tmp_path), autoencoder_island=when)).eval()
    assert is_island(model.autoencoder) is raised
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        exact = model.moments(images)
        latents = model.latents(exact, torch.zeros_like)
        decoded = model.pixels(latents)
        with resolve_precision_name("bf16").autocast(CPU):
            rounded, drawn = model.moments(images), model.pixels(latents)
    assert {tensor.dtype for tensor in (rounded, drawn)} == {torch.float32}
    assert torch.equal(rounded, exact) is raised
    assert torch.equal(drawn, decoded) is raised


@pytest.mark.parametrize("condition", ["none", "embedding"])
def test_timesteps_are_told_apart_in_16_bits(tmp_path: Path, condition: str) -> None:
    data = embedded(tmp_path, (2, 6)) if condition == "embedding" else {}
    net: Any = model_of(diffusion(data, condition=condition, timesteps=1000)).denoiser
    at = torch.arange(1000)
    with torch.no_grad():
        exact = net.time_embedding(net.time_proj(at))
        with resolve_precision_name("bf16").autocast(CPU):
            rounded = net.time_embedding(net.time_proj(at))
    assert torch.equal(rounded, exact)
    assert len(rounded.unique(dim=0)) == 1000


def test_evaluations_are_the_same_every_time_and_training_is_not() -> None:
    task = diffusion(condition_drop=0.9)
    model, batch = model_of(task).eval(), batch_of(task, "val")
    torch.manual_seed(1)
    first = task.loss(model, batch)
    torch.manual_seed(2)
    assert task.loss(model, batch) == first
    assert diffusion(condition_drop=0.0, guidance=1.0).loss(model, batch) == first  # dropped in training only
    model.train()
    assert task.loss(model, batch) != task.loss(model, batch)


def test_an_absent_condition_is_the_class_of_its_own() -> None:
    model = model_of(diffusion()).eval()
    noisy, at = torch.randn(3, 4, 8, 8), torch.tensor([1, 50, 99])
    asked = Condition.of(torch.tensor([0, 1, 2]))
    none = Condition.of(torch.full((3,), 4))  # behind the four classes
    with torch.no_grad():
        assert torch.equal(model.denoise(noisy, at, asked.absent()), model.denoise(noisy, at, none))
        assert not torch.equal(model.denoise(noisy, at, asked), model.denoise(noisy, at, none))


def test_a_share_of_conditions_is_dropped() -> None:
    torch.manual_seed(0)
    kept = Condition.of(torch.zeros(4000)).dropped(0.25).kept
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert Condition.of(torch.zeros(9)).dropped(0.0).kept.all()


def test_an_absent_image_says_nothing() -> None:
    model = model_of(diffusion(MAPS, **PIXELS, condition="image")).eval()
    noisy, at = torch.randn(2, 1, 16, 16), torch.tensor([3, 3])
    maps = [Condition.of(torch.randn(2, 2, 16, 16)) for _ in range(2)]
    with torch.no_grad():
        assert torch.equal(*(model.denoise(noisy, at, one.absent()) for one in maps))
        assert not torch.equal(*(model.denoise(noisy, at, one) for one in maps))


def test_image_and_condition_are_flipped_together() -> None:
    task = diffusion({**MAPS, "augment": "flip"}, **PIXELS, condition="image")
    sample, plain = task.source("train").read(0), diffusion(MAPS, **PIXELS, condition="image")
    still = plain.transform("train", sample)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        got = task.transform("train", sample)
        turned = [not torch.equal(got[name], still[name]) for name in ("image", "condition")]
        assert turned[0] == turned[1]
        seen.add(turned[0])
    assert seen == {True, False}
    assert torch.equal(task.transform("val", sample)["image"], still["image"])


@pytest.mark.parametrize("image", [
    torch.zeros(3, 40, 30, dtype=torch.uint8), torch.zeros(3, 9, 9, dtype=torch.uint16), torch.zeros(3, 16, 16),
])  # fmt: skip
def test_images_of_every_kind_are_brought_between_minus_one_and_one(image: torch.Tensor) -> None:
    task = diffusion()
    dark = task.transform("val", {"image": image})["image"]
    bright = 1.0 if image.is_floating_point() else torch.iinfo(image.dtype).max
    light = task.transform("val", {"image": torch.full_like(image, bright)})["image"]
    assert dark.shape == light.shape == (3, 16, 16)
    assert dark.unique().tolist() == [-1.0]
    assert light.unique().tolist() == [1.0]


@pytest.mark.wording
def test_predicting_needs_something_to_look_at() -> None:
    task = diffusion(**PIXELS)
    with pytest.raises(WrongUse, match="halfstep predict RUN"):
        task.predict(model_of(task).eval(), torch.zeros(3, 16, 16, dtype=torch.uint8))
    maps = diffusion(MAPS, **PIXELS, condition="image")
    assert maps.channels_read == 2
    with pytest.raises(WrongUse, match="2 channels"):
        maps.predict(model_of(maps).eval(), torch.zeros(3, 16, 16, dtype=torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_gives_a_loss_that_is_not(bad: float) -> None:
    task = diffusion()
    batch = batch_of(task, "train", 2)
    batch["image"][0, 0, 0, 0] = bad
    assert not torch.isfinite(task.loss(model_of(task), batch))


@pytest.mark.filterwarnings("ignore")
def test_the_parts_that_are_called_are_what_is_compiled() -> None:
    task = diffusion(stage="autoencoder")
    model, batch = model_of(task).eval(), batch_of(task, "val", 2)
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = task.loss(model, batch)
        model.compile(backend=kept)
        assert task.loss(model, batch) == expected
    torch._dynamo.reset()
    assert len(graphs) == 2  # encoder and decoder, each in one piece
