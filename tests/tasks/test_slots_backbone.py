"""Slots on the features of a frozen backbone: timm's models, with random weights here."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.errors import BadData, BadRecipe, StateMismatch, UnknownName, Unsafe
from tests.tasks.made import batch_of, made

SIZE = {"size": 64}


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


def with_backbone(name: str, weights: str = "none", **more: Any) -> Any:
    return made("slots", model={"backbone": name, "backbone_weights": weights, **more}, data=SIZE)


@pytest.mark.parametrize(("name", "places"), [("test_vit", 4), ("test_resnet", 2), ("test_efficientnet", 2)])
def test_the_backbone_is_frozen_and_the_rest_learns(name: str, places: int) -> None:
    torch.manual_seed(0)
    task = with_backbone(name)
    model = task.model().train()
    backbone = model.encoder.backbone
    before = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}
    task.loss(model, batch_of(task, "train", 2)).backward()
    assert model.places == places
    assert not any(module.training for module in backbone.modules())
    assert model.encoder.mlp.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in backbone.parameters())
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    # Batch statistics too: in training mode they would move.
    assert all(torch.equal(before[key], tensor) for key, tensor in backbone.state_dict().items())


def test_the_backbone_sees_frames_as_it_was_trained() -> None:
    task = with_backbone("test_vit")
    backbone = task.model().encoder.backbone
    frames = torch.rand(2, 3, 64, 64)
    settings = timm.get_pretrained_cfg("test_vit")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (settings.mean, settings.std))
    with torch.no_grad():
        expected = backbone.model.forward_features((frames - mean) / std)[:, 1:]
    assert torch.allclose(backbone(frames * 2 - 1), expected, atol=1e-5)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_file_of_tensors_is_read_and_positions_fit_the_size(tmp_path: Path, ending: str) -> None:
    torch.manual_seed(1)
    whole = timm.create_model("test_vit").state_dict()  # 160 pixels, and a head that the backbone has not
    file = tmp_path / f"vit.{ending}"
    save_file(whole, file) if ending == "safetensors" else torch.save(whole, file)
    backbone = with_backbone("test_vit", str(file)).model().encoder.backbone
    found = backbone.model.state_dict()
    assert found["pos_embed"].shape[1] < whole["pos_embed"].shape[1]
    assert all(torch.equal(found[name], whole[name]) for name in found if name != "pos_embed")


@pytest.mark.wording
def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), other)
    with pytest.raises(StateMismatch, match=r"does not fit the backbone"):
        with_backbone("test_vit", str(other)).model()
    (tmp_path / "code.pt").write_bytes(pickle.dumps({"weight": Path("x")}))
    with pytest.raises((Unsafe, BadData)):
        with_backbone("test_vit", str(tmp_path / "code.pt")).model()
    with pytest.raises(BadData, match="no weights at"):
        with_backbone("test_vit", str(tmp_path / "gone.safetensors")).model()
    nan = timm.create_model("test_vit").state_dict()
    nan["norm.weight"] = nan["norm.weight"] * float("nan")
    save_file(nan, tmp_path / "nan.safetensors")
    with pytest.raises(BadData, match="not finite"):
        with_backbone("test_vit", str(tmp_path / "nan.safetensors")).model()


@pytest.mark.wording
def test_names_and_sizes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="vit_small_patch16_224"):
        with_backbone("vit_smal_patch16_224").model()
    with pytest.raises(BadRecipe, match="square map of features"):
        made("slots", model={"backbone": "test_vit", "backbone_weights": "none"}, data={"size": 16}).model()
    done = halfstep("train", "slots_tiny", "model.backbone=test_vitt", f"run.dir={tmp_path / 'run'}")
    assert done.exit_code == 78, done.output
    assert "did you mean 'test_vit'?" in done.stderr


@pytest.mark.slow
def test_a_run_with_a_backbone_resumes_exactly_without_its_file(tmp_path: Path) -> None:
    file, run = tmp_path / "vit.safetensors", tmp_path / "run"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), file)
    words = ["data.samples=10", "data.size=32", "data.frames=2", "train.batch_size=2", "--fp32", "run.pictures=0"]
    words += ["model.backbone=test_vit", f"model.backbone_weights={file}", f"run.dir={run}", "num_workers=0"]
    done = halfstep("train", "slots_tiny", *words, "train.steps=2")
    assert done.exit_code == 0, done.output
    proof = halfstep("verify", run, "--resume", "--steps", "1")
    assert proof.exit_code == 0, proof.output
    file.unlink()
    longer = halfstep("train", "slots_tiny", *words, "train.steps=4", "--extend")
    assert longer.exit_code == 0, longer.output
    assert halfstep("evaluate", run).exit_code == 0
